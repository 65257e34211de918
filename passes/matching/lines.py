"""Tensors of two values parted by a straight line, and integers that grow along axes: what masks are made of.

A :class:`Line` is ``sum(slope[a] * index[a]) + offset`` over a tensor's axes; a :class:`Split` holds one value
where a line is >= 0 and another where it is not.  Offsets may hold symbolic dimensions, which are >= 0.
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
class Split:
    """``hit`` where ``line >= 0``, ``miss`` elsewhere; without a line ``hit`` everywhere."""

    hit: float
    miss: float = 0.0
    line: Line | None = None

    def move(self, slopes: Callable[[Sequence[int]], Sequence[int]]) -> Split:
        """Return the split over other axes."""
        return self if self.line is None else replace(self, line=self.line.move(slopes(self.line.slopes)))


Value = Line | Split


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


def uniform(value: Line | Split | None) -> float | None:
    """Return the number a tensor holds everywhere."""
    if isinstance(value, Split):
        return value.hit if value.line is None else None
    if isinstance(value, Line) and not any(value.slopes) and isinstance(value.offset, (int, tirx.IntImm)):
        return float(int(value.offset))
    return None


def _upward(split: Split) -> Split:
    """Return the split with the first slope positive: the same values, one form."""
    if split.line is None or next((s for s in split.line.slopes if s), 1) > 0:
        return split
    line = split.line.times(-1)
    return Split(split.miss, split.hit, replace(line, offset=line.offset - 1))


def combine(function: Callable[..., float], splits: Sequence[Split]) -> Split | None:
    """Return ``function`` of splits, element by element, None where more than two values remain.

    The lines have to be parallel, their order provable.
    """
    splits = [_upward(s) for s in splits]
    lines: list[Line] = []
    owner: list[int] = []
    for split in splits:
        if split.line is None:
            owner.append(-1)
            continue
        for n, known in enumerate(lines):
            a, b = aligned(known, split.line)
            if a.slopes != b.slopes:
                return None
            if proved(a.offset >= b.offset) and proved(b.offset >= a.offset):
                owner.append(n)
                break
        else:
            lines.append(split.line)
            owner.append(len(lines) - 1)
    # A larger offset is reached earlier; with all of them in order, each cell between two lines has one value.
    order: list[int] = []
    for n, line in enumerate(lines):
        place = 0
        while place < len(order) and proved(lines[order[place]].offset >= line.offset):
            place += 1
        if not all(proved(line.offset >= lines[m].offset) for m in order[place:]):
            return None
        order.insert(place, n)
    passed = {n: place for place, n in enumerate(order)}
    cells = []
    for cell in range(len(lines) + 1):
        args = [s.hit if n < 0 or passed[n] < cell else s.miss for s, n in zip(splits, owner)]
        with np.errstate(all="ignore"):
            cells.append(float(function(*args)))
    changes = [n for n in range(len(lines)) if cells[n] != cells[n + 1]]
    if len(changes) > 1 or any(np.isnan(c) for c in cells):
        return None
    if not changes:
        return Split(cells[0])
    return Split(cells[-1], cells[0], lines[order[changes[0]]])


def of_array(array: np.ndarray) -> Line | Split | None:
    """Return what a constant holds: one number, a range of integers, or two values parted by a diagonal."""
    if array.size == 0 or array.dtype.kind not in "biuf":
        return None
    values = np.unique(array)
    if len(values) == 1:
        return Split(float(values[0]))
    if array.dtype.kind in "iu" and (line := _ramp(array)) is not None:
        return line
    if len(values) > 2 or array.ndim < 1:
        return None
    table = array.reshape(-1, *array.shape[-2:]) if array.ndim > 1 else array[None, None]
    if not (table == table[:1]).all():
        return None
    rows, columns = table.shape[1:]
    kept = table[0] == table[0, -1, 0]
    # The first row with both values fixes the diagonal; the whole table has to lie on it.
    mixed = [r for r in range(rows) if kept[r].any() and not kept[r].all()]
    if not mixed:
        return None
    offset = int(kept[mixed[0]].sum()) - 1 - mixed[0]
    if not np.array_equal(kept, np.arange(columns) <= np.arange(rows)[:, None] + offset):
        return None
    hit = float(table[0, -1, 0])
    miss = float(values[0] if values[1] == table[0, -1, 0] else values[1])
    slopes = (*(0,) * (array.ndim - 2), 1, -1)[-array.ndim :]
    return Split(hit, miss, Line(slopes, offset))


def _ramp(array: np.ndarray) -> Line | None:
    origin = array[(0,) * array.ndim]
    slopes = []
    for axis, size in enumerate(array.shape):
        step = np.take(array, 1, axis).flat[0] - origin if size > 1 else 0
        slopes.append(int(step))
    want = np.full(array.shape, int(origin), dtype="int64")
    for axis, (size, slope) in enumerate(zip(array.shape, slopes)):
        want = want + (np.arange(size) * slope).reshape([-1 if a == axis else 1 for a in range(array.ndim)])
    return Line(tuple(slopes), int(origin)) if np.array_equal(want, array.astype("int64")) else None
