"""Tile, vectorize and parallelize every schedulable kernel of a module for a CPU.

Before: a PrimFunc of plain loop nests.  After: the same function with tiled, vectorized and parallel loops and the
attribute ``tirx.is_scheduled``.

Fires when a PrimFunc carries ``s_tir`` and is not marked scheduled.
Never when TVM will turn the function into a view (reshapes), or no rule of schedules.cpu understands it.

Numerics: reassociates (sums are split over vector lanes).
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import relax, tirx

from crossloom.errors import UnsupportedTarget
from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.schedules import cpu
from crossloom.verdict import Verdict, accept, record, refuse

_NAME = "schedule-cpu"
_SCHEDULED = "tirx.is_scheduled"


def _target(func: tirx.PrimFunc, given: tvm.target.Target | None) -> tvm.target.Target:
    found = given or tvm.target.Target.current(allow_none=True) or (func.attrs or {}).get("target")
    if found is None:
        raise UnsupportedTarget(
            "ScheduleCPU knows no target", "pass one, or run it inside `with tvm.target.Target(...)`"
        )
    return found


def _verdict(kernel: str, outcome: cpu.Outcome) -> Verdict:
    if not outcome.rule:
        return refuse("no-rule", kernel, outcome.problem or "no rule understands it; it stays plain loops")
    return accept(detail="; ".join(filter(None, (outcome.rule, outcome.problem))))


def ScheduleCPU(target: tvm.target.Target | None = None) -> tvm.transform.Pass:
    """Return the pass.

    Parameters
    ----------
    target : tvm.target.Target or None
        None takes the current target, else each function's attribute ``target``.
    """

    @tvm.transform.module_pass(opt_level=0, name=_NAME)
    def schedule_cpu(mod: tvm.ir.IRModule, _: tvm.transform.PassContext) -> tvm.ir.IRModule:
        out = mod.clone()
        done: dict[int, list[tuple[tirx.PrimFunc, cpu.Outcome]]] = {}
        for gv, func in mod.functions_items():
            attrs = func.attrs or {}
            if not isinstance(func, tirx.PrimFunc) or "s_tir" not in attrs or _SCHEDULED in attrs:
                continue
            # RewriteDataflowReshape recognises these as written and makes them views.
            if relax.analysis.has_reshape_pattern(func):
                verdict = refuse("is-a-view", gv.name_hint, "TVM makes it a view of its input, which takes no time")
                record(verdict.at(_NAME, gv.name_hint, ""))
                continue
            bare = func.without_attr("global_symbol")
            seen = done.setdefault(tvm_ffi.structural_hash(bare), [])
            outcome = next((b for a, b in seen if tvm_ffi.structural_equal(a, bare)), None)
            if outcome is None:
                outcome = cpu.attempt(bare, _target(func, target))
                seen.append((bare, outcome))
            record(_verdict(gv.name_hint, outcome).at(_NAME, gv.name_hint, ""))
            # Also where no rule took it: nothing is to try again.
            new = outcome.func.with_attr(_SCHEDULED, True)
            if "global_symbol" in attrs:
                new = new.with_attr("global_symbol", attrs["global_symbol"])
            out.update_func(gv, new)
        return out

    return schedule_cpu


PASS = PassInfo(_NAME, ScheduleCPU, "lower", REASSOCIATES, doc="Tile, vectorize and parallelize kernels for a CPU.")
