"""``assert_pass_preserves``: a property test of a pass in one line.

To test your own pass::

    from crossloom.numerics import REASSOCIATES
    from crossloom.testing import assert_pass_preserves, strategies

    def test_my_pass() -> None:
        assert_pass_preserves(MyPass(), strategies.gated_mlp(), numerics=REASSOCIATES)
"""

from __future__ import annotations

import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st
from tvm import relax
from tvm_ffi import structural_equal

from ..errors import UsageError
from ..numerics import Numerics
from ..registry import passes
from .strategies import Case
from .strategies import modules as all_modules
from .verify import compare, run_entries


def _declared(pass_: tvm.transform.Pass) -> Numerics:
    name = str(pass_.info.name)
    for info in passes().values():
        if name in (info.name, getattr(info.factory, "__name__", "")):
            return info.numerics
    raise UsageError(f"pass {name!r} is not in the registry", "give numerics=")


def assert_pass_preserves(
    pass_: tvm.transform.Pass,
    modules: st.SearchStrategy[Case] | None = None,
    *,
    numerics: Numerics | None = None,
    max_examples: int = 25,
    seed: int = 0,
) -> None:
    """Check that a pass keeps results, is idempotent, gives well-formed modules and leaves its input alone.

    Parameters
    ----------
    numerics : Numerics, optional
        Taken from the registry by the pass's name when missing.

    Raises
    ------
    AssertionError
        Naming entry, output, error and bound, with the seed and the module (shrunk by hypothesis).
    UsageError
        When no class is given and the registry has none.
    """
    held_to = numerics or _declared(pass_)

    @hypothesis_seed(seed)
    @settings(max_examples=max_examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(modules if modules is not None else all_modules())
    def prove(case: Case) -> None:
        where = f"\nseed {seed}, length {case.length}\n{case.mod.script()}"
        inputs, saved = case.inputs(seed), tvm.ir.save_json(case.mod)
        before = run_entries(case.mod, inputs)
        after = pass_(case.mod)
        if not structural_equal(case.mod, tvm.ir.load_json(saved)):
            raise AssertionError(f"the pass changed its input{where}")
        if not relax.analysis.check_well_formed(after):
            raise AssertionError(f"the result is not well-formed{where}")
        _, problem = compare(held_to, before, run_entries(after, inputs))
        if problem:
            raise AssertionError(f"{problem}{where}")
        if not structural_equal(pass_(after), after):
            raise AssertionError(f"twice differs from once{where}")

    prove()
