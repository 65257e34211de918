"""``assert_pass_preserves``: a property test of a pass in one line."""

from __future__ import annotations

import tvm
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st
from tvm import relax
from tvm_ffi import structural_equal

from ..errors import UsageError
from ..numerics import Numerics
from .execution import HostExecutor, as_model, make_calls
from .records import compare, reason
from .stages import contract_of
from .strategies import Case
from .strategies import modules as all_modules


def _declared(pass_: tvm.transform.Pass) -> Numerics:
    name = str(pass_.info.name)
    found = contract_of(name)
    if found is None:
        raise UsageError(f"pass {name!r} is not in the registry", "give numerics=")
    return found


def assert_pass_preserves(
    pass_: tvm.transform.Pass,
    modules: st.SearchStrategy[Case] | None = None,
    *,
    numerics: Numerics | None = None,
    max_examples: int = 25,
    seed: int = 0,
    shrink: bool = True,
    may_do_nothing: bool = False,
) -> None:
    """Check that a pass keeps results, is idempotent, gives well-formed modules and leaves its input alone.

    A pass that changed none of the modules was not tested, and fails.

    Parameters
    ----------
    pass_ : tvm.transform.Pass
    modules : hypothesis strategy of Case, optional
        All of :mod:`crossloom.testing.strategies` when missing.
    numerics : Numerics, optional
        Taken from the registry by the pass's name when missing.
    max_examples : int
        Modules to try; every one is run at all its lengths.
    seed : int
        Of the modules and of their inputs.
    shrink : bool
        Whether hypothesis looks for a smaller module that fails, which takes some more builds.
    may_do_nothing : bool
        Whether it is right that no module has anything to change.

    Raises
    ------
    AssertionError
        Naming entry, length, output, error and bound, with the seed and the module; or that no module changed.
    UsageError
        When no class is given and the registry has none.
    """
    held_to = numerics or _declared(pass_)
    changed: list[bool] = []
    phases = [Phase.explicit, Phase.generate, *([Phase.shrink] if shrink else [])]

    @hypothesis_seed(seed)
    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        phases=phases,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(modules if modules is not None else all_modules())
    def prove(case: Case) -> None:
        problem, acted = find_problem(pass_, case, held_to, seed)
        changed.append(acted)
        if problem:
            raise AssertionError(
                f"pass {pass_.info.name}: {problem}\nseed {seed}\n{case.mod.script(show_meta=False)}"
            ) from None

    prove()
    if not may_do_nothing and not any(changed):
        raise AssertionError(
            f"pass {pass_.info.name}: the pass changed none of {len(changed)} modules\nseed {seed}\n"
            "draw modules it has something to do in, or say may_do_nothing=True"
        )


def find_problem(pass_: tvm.transform.Pass, case: Case, numerics: Numerics, seed: int = 0) -> tuple[str, bool]:
    """Return what a pass does wrong to one module, ``""`` when nothing, and whether it changed it."""
    saved = tvm.ir.save_json(case.mod)
    try:
        after = pass_(case.mod)
    except Exception as error:
        return f"it fails: {reason(error)}", False
    if not structural_equal(case.mod, tvm.ir.load_json(saved)):
        return "it changed its input module, which the caller may still hold", True
    try:
        relax.analysis.well_formed(after)
    except Exception as error:
        return f"the result is not well-formed: {reason(error)}", True
    if structural_equal(case.mod, after):
        return "", False  # nothing to run: most passes leave most modules alone
    return _find_problem_in(pass_, case, after, numerics, seed), True


def _find_problem_in(
    pass_: tvm.transform.Pass, case: Case, after: tvm.ir.IRModule, numerics: Numerics, seed: int
) -> str:
    """Return what is wrong with what a pass made of a module, ``""`` when nothing."""
    model, execute = as_model(case.mod), HostExecutor()
    calls = make_calls(model, seed=seed, lengths=case.sizes)
    before = execute(model, calls)
    try:
        outputs = execute(as_model(after), calls)
    except Exception as error:
        return f"the result does not run: {reason(error)}"
    _, violations = compare(numerics, calls, before, outputs)
    if violations:
        return "; ".join(map(str, violations))
    try:
        again = pass_(after)
    except Exception as error:
        return f"it fails on its own result: {reason(error)}"
    if not structural_equal(again, after):
        return f"twice differs from once; after the second time:\n{again.script(show_meta=False)}\nof the module"
    return ""
