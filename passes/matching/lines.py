"""Tensors of a few values parted by straight lines, and integers that grow along axes: what masks are made of.

A :class:`Line` is ``sum(slope[a] * index[a]) + offset`` over a tensor's axes; :class:`Steps` hold a few values, which
change where parallel lines become >= 0.  Offsets may hold symbolic dimensions, which are >= 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm
from tvm import ir, tirx
from tvm_ffi import structural_walk

#: An integer, or a ``tirx`` expression of symbolic dimensions (untyped for mypy: TVM has no stubs).
Offset = Any
#: More lines part no mask: two bound a window.
MOST_STEPS = 4


@dataclass(frozen=True)
class Line:
    """``sum(slopes[a] * index[a]) + offset``."""

    slopes: tuple[int, ...]
    offset: Offset

    def move(self, slopes: Sequence[int]) -> Line:
        """Return the line over other axes."""
        return replace(self, slopes=tuple(slopes))

    def times(self, factor: int) -> Line:
        """Return the multiple of the line."""
        return Line(tuple(factor * s for s in self.slopes), factor * self.offset)

    def plus(self, other: Line) -> Line:
        """Return the sum, the axes aligned at the last one."""
        mine, theirs = aligned(self, other)
        return Line(tuple(a + b for a, b in zip(mine.slopes, theirs.slopes)), self.offset + other.offset)


@dataclass(frozen=True)
class Steps:
    """``values[n]`` where exactly the first n of some parallel lines are >= 0; what comes later is reached later."""

    values: tuple[float, ...]
    lines: tuple[Line, ...] = ()

    def each(self, change: Callable[[Line], Line]) -> Steps:
        """Return the same values parted by other lines."""
        return replace(self, lines=tuple(map(change, self.lines)))

    def move(self, slopes: Callable[[Sequence[int]], Sequence[int]]) -> Steps:
        """Return the steps over other axes."""
        return self.each(lambda line: line.move(slopes(line.slopes)))

    def turned(self) -> Steps:
        """Return the same with every line negated."""
        lines = (line.times(-1) for line in reversed(self.lines))
        return Steps(self.values[::-1], tuple(replace(line, offset=line.offset - 1) for line in lines))


Value = Line | Steps


def parted(hit: float, miss: float, line: Line) -> Steps:
    """Return ``hit`` where a line is >= 0, ``miss`` elsewhere."""
    return Steps((miss, hit), (line,))


def aligned(left: Line, right: Line) -> tuple[Line, Line]:
    """Return two lines over as many axes, as broadcasting aligns them."""
    rank = max(len(left.slopes), len(right.slopes))
    a, b = ((0,) * (rank - len(x.slopes)) + x.slopes for x in (left, right))
    return left.move(a), right.move(b)


def proved(condition: object) -> bool:
    """Return whether a comparison of offsets holds for all sizes of the symbolic dimensions."""
    if isinstance(condition, (bool, np.bool_)):
        return bool(condition)
    analyzer = tvm.sym.Analyzer()

    def bound(var: ir.Var) -> None:
        analyzer.update(var, tvm.sym.ConstIntBound(0, 2**40), True)

    structural_walk(condition, (ir.Var, bound))
    return bool(analyzer.can_prove(condition))


def distance(left: tirx.Expr, right: tirx.Expr) -> Offset | None:
    """Return ``abs(right - left)``, a number where it is one; None where which of them is less is not proved."""
    away = tvm.sym.Analyzer().simplify(right - left)
    if isinstance(away, (int, tirx.IntImm)):
        return abs(int(away))
    return right - left if proved(right >= left) else left - right if proved(left >= right) else None


def uniform(value: Value | None) -> float | None:
    """Return the number a tensor holds everywhere."""
    if isinstance(value, Steps):
        return None if value.lines else value.values[0]
    if isinstance(value, Line) and not any(value.slopes) and isinstance(value.offset, (int, tirx.IntImm)):
        return float(int(value.offset))
    return None


def as_line(value: Value) -> Line | None:
    """Return the line a value is, or a level one for a whole number."""
    if isinstance(value, Line):
        return value
    number = uniform(value)
    return Line((), int(number)) if number is not None and number.is_integer() else None


def reach(line: Line, shape: Sequence[Offset]) -> tuple[Offset, Offset]:
    """Return the least and the greatest number of a line over a tensor of a shape that is not empty."""
    low = high = line.offset
    for slope, size in zip(reversed(line.slopes), reversed(shape)):
        if slope > 0:
            high = high + slope * (size - 1)
        elif slope < 0:
            low = low + slope * (size - 1)
    return low, high


def settled(value: Value, shape: Sequence[Offset]) -> Value:
    """Return a value without the lines that a tensor of a shape lies on one side of."""
    if isinstance(value, Line):
        return value
    values, lines = value.values, value.lines
    while lines and proved(reach(lines[0], shape)[0] >= 0):
        values, lines = values[1:], lines[1:]
    while lines and proved(reach(lines[-1], shape)[1] < 0):
        values, lines = values[:-1], lines[:-1]
    return Steps(values, lines)


def _upward(steps: Steps) -> Steps:
    """Return the steps with the first slope positive: the same values, one form."""
    if not steps.lines or next((s for s in steps.lines[0].slopes if s), 1) > 0:
        return steps
    return steps.turned()


def combine(function: Callable[..., float], operands: Sequence[Steps]) -> Steps | None:
    """Return ``function`` of steps, element by element, None where too many steps remain.

    The lines have to be parallel, their order provable.
    """
    operands = [_upward(s) for s in operands]
    order: list[Line] = []
    for line in (line for steps in operands for line in steps.lines):
        if (placed := _placed(order, line)) is None:
            return None
        order = placed
    # With all lines in order, each cell between two of them has one value.
    values: list[float] = []
    lines: list[Line] = []
    for cell in range(len(order) + 1):
        with np.errstate(all="ignore"):
            value = float(function(*(steps.values[_passed(steps, order[:cell])] for steps in operands)))
        if np.isnan(value):
            return None
        if values and value != values[-1]:
            lines.append(order[cell - 1])
        if not values or value != values[-1]:
            values.append(value)
    return Steps(tuple(values), tuple(lines)) if len(lines) <= MOST_STEPS else None


def _placed(order: list[Line], line: Line) -> list[Line] | None:
    """Return lines in the order in which they are reached, with one more; None where its place is not known."""
    if order and (pair := aligned(order[0], line))[0].slopes != pair[1].slopes:
        return None
    # A larger offset is reached earlier.
    place = 0
    while place < len(order) and proved(order[place].offset >= line.offset):
        place += 1
    if not all(proved(line.offset >= other.offset) for other in order[place:]):
        return None
    if place and proved(line.offset >= order[place - 1].offset):
        return order
    return [*order[:place], line, *order[place:]]


def _passed(steps: Steps, reached: Sequence[Line]) -> int:
    """Return how many lines of steps are among those reached."""
    return sum(proved(line.offset >= reached[-1].offset) for line in steps.lines) if reached else 0
