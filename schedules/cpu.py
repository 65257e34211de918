"""Schedules of CPU kernels: the rules in order, and the functions that LLVM can make vectors of.

The rules use TVM's schedule primitives only, which refuse a change of meaning; a rule that is refused gives way to
the next, and the last resort is the function as it was.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Outcome:
    """What the rules made of a function.

    Attributes
    ----------
    func : tvm.tirx.PrimFunc
        As it was where no rule took it, but for sums that start before their loops.
    rule : str
        The rule that took it, ``""`` for none.
    problem : str
        The last rule that TVM refused, and why; ``""`` where no rule was refused.
    """

    func: tvm.tirx.PrimFunc
    rule: str = ""
    problem: str = ""


def schedule(func: tvm.tirx.PrimFunc, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
    """Return what :func:`attempt` makes of a function, without the account of it."""
    return attempt(func, target).func


def attempt(func: tvm.tirx.PrimFunc, target: tvm.target.Target) -> Outcome:
    """Tile, vectorize and parallelize ``func`` for ``target`` by the first rule that applies.

    What a rule itself raises is an error of ours and goes out; only TVM's refusals make it give way.

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
    problem = ""
    for rule in RULES:
        sch = Schedule(func)
        try:
            if rule(sch, machine):
                start_sums(sch)
                return Outcome(sch.mod["main"], rule.__name__, problem)
        except (ScheduleError, tvm.error.InternalError) as error:
            problem = f"{rule.__name__}: {_reason(error)}"
    sch = Schedule(func)
    start_sums(sch)
    return Outcome(sch.mod["main"], problem=problem)


def _reason(error: Exception) -> str:
    """Return TVM's message without the function that it prints along."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("Error message:")]
    return (said or lines or [type(error).__name__])[-1].removeprefix("Error message:").strip()


__all__ = ["RULES", "Machine", "Outcome", "attempt", "schedule"]
