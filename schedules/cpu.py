"""Schedules of CPU kernels: the rules in order, and the functions that LLVM can make vectors of.

The rules use TVM's schedule primitives only, which refuse a change of meaning; a rule that is refused gives way to
the next, and the last resort is the function as it was.
"""

from __future__ import annotations

import tvm
from tvm.s_tir.schedule import Schedule
from tvm.s_tir.schedule.schedule import ScheduleError

from .contraction import contraction
from .elementary import vectorizable_math
from .elementwise import elementwise
from .machine import Machine
from .rows import rows
from .steps import start_sums

#: Matrix products and convolutions; softmax and norms; everything else.
RULES = (contraction, rows, elementwise)


def schedule(func: tvm.tirx.PrimFunc, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
    """Return ``func`` tiled, vectorized and parallel for ``target``, or as it was where no rule applies.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Schedulable (attribute ``s_tir``), of loop nests around single blocks; symbolic shapes allowed.
    target : tvm.target.Target
        An ``llvm`` or ``c`` target; for ``c`` exp, erf, tanh and the like stay calls of libm.
    """
    machine = Machine.of(target)
    if target.kind.name == "llvm":
        func = vectorizable_math(func)
    for rule in RULES:
        sch = Schedule(func)
        try:
            if rule(sch, machine):
                start_sums(sch)
                return sch.mod["main"]
        except (ScheduleError, tvm.error.InternalError, RuntimeError, ValueError):
            continue
    sch = Schedule(func)
    start_sums(sch)
    return sch.mod["main"]


__all__ = ["RULES", "Machine", "schedule"]
