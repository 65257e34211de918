"""Hold every pass of a pipeline to its numerics class; name the pass and the rewrite that break it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import tvm

from ..errors import BudgetExceeded
from ..model import Model
from ..numerics import EXACT, Numerics
from .bisection import Culprit, find_rewrite
from .execution import Executor, HostExecutor, Outputs, as_model, make_calls
from .records import Record, compare
from .stages import Stage, pass_stage, walk

Inputs = Mapping[str, Sequence[np.ndarray]]
Step = tuple[str, tvm.transform.Pass, Numerics]


def _stages(passes: Sequence[Step | Stage]) -> list[Stage]:
    return [item if isinstance(item, Stage) else pass_stage(*item) for item in passes]


def verify_pipeline(
    model: Model | tvm.ir.IRModule,
    passes: Sequence[Step | Stage],
    inputs: Inputs | None = None,
    *,
    seed: int = 0,
    lengths: Sequence[int | Mapping[str, int]] = (3,),
    budget: float | None = None,
    execute: Executor | None = None,
) -> list[Record]:
    """Run every entry before and after each pass and hold each to its class.

    Parameters
    ----------
    model : Model or tvm.ir.IRModule
        Must run as it is.
    passes : sequence of (name, pass, Numerics) or Stage
    inputs : mapping of str to arrays, optional
        Inputs of each entry: all parameters of a module's, without the weights of a Model's.  Drawn from ``seed``
        when missing.
    lengths : sequence of int or of mapping of str to int
        Values of symbolic dimensions (elements) to draw inputs for.
    budget : float, optional
        Largest error of the whole pipeline against the original.
    execute : Executor, optional
        Where to run; this machine when missing.

    Raises
    ------
    BudgetExceeded
        Naming the three passes with the largest errors.

    Examples
    --------
    >>> from tvm import relax
    >>> from crossloom.numerics import REASSOCIATES
    >>> bb, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((2, 3), "float32"))
    >>> with bb.function("main", [x]):
    ...     _ = bb.emit_func_output(bb.emit(relax.op.nn.silu(x)))
    >>> (record,) = verify_pipeline(bb.get(), [("legalize", relax.transform.LegalizeOps(), REASSOCIATES)])
    >>> record.problem, record.worst_error
    ('', 0.0)
    """
    model = model if isinstance(model, Model) else as_model(model)
    calls = make_calls(model, inputs, seed=seed, lengths=lengths)
    execute = execute or HostExecutor()
    records: list[Record] = []
    original: Outputs | None = None
    last: Outputs = []
    for step in walk(model, _stages(passes), execute, calls):
        original, last = original or step.expected, step.outputs
        records.append(step.record)
    if budget is not None and original is not None:
        check_budget(records, max(compare(EXACT, calls, original, last)[0].values(), default=0.0), budget)
    return records


def check_budget(records: Sequence[Record], total: float, budget: float) -> None:
    """Raise BudgetExceeded, naming the worst passes, where the whole is too far off or its end does not run."""
    if records and not records[-1].runnable:
        raise BudgetExceeded("numerics of the pipeline", budget, float("inf"), [(records[-1].name, float("inf"))])
    if not total <= budget:
        ranked = sorted(((r.name, r.worst_error) for r in records if r.runnable), key=lambda p: -p[1])
        raise BudgetExceeded("numerics of the pipeline", budget, total, ranked)


def bisect(
    model: Model | tvm.ir.IRModule,
    passes: Sequence[Step | Stage],
    inputs: Inputs | None = None,
    *,
    seed: int = 0,
    lengths: Sequence[int | Mapping[str, int]] = (3,),
    execute: Executor | None = None,
) -> Culprit | None:
    """Return the first pass outside its contract and the rewrite at fault, or None.

    The rules of the pass are held back through :func:`crossloom.rewrite.limit_rewrites`: by binary search over
    the rewrites in the order they fired, the first whose addition breaks the contract.  Parameters are those of
    :func:`verify_pipeline`.
    """
    model = model if isinstance(model, Model) else as_model(model)
    calls = make_calls(model, inputs, seed=seed, lengths=lengths)
    execute = execute or HostExecutor()
    for step in walk(model, _stages(passes), execute, calls):
        if step.record.problem:
            return find_rewrite(step, execute, calls)
    return None
