"""Views of a linear layer's columns: where each axis of a reshaped, transposed or cut result comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import relax, tirx

from crossloom.rewrite.sizes import same_size

from ..matching.spelling import number


@dataclass(frozen=True)
class Axis:
    """One axis of a view.

    Attributes
    ----------
    extent : int or tvm.tirx.Expr
    row : int or None
        The leading axis of x that it is.
    stride : int
        Columns from one index to the next, where it is no row; an axis of extent 1 has none.
    """

    extent: int | tirx.Expr
    row: int | None = None
    stride: int = 0

    @property
    def is_unit(self) -> bool:
        """Whether there is only the index 0."""
        return isinstance(self.extent, int) and self.extent == 1


UNIT = Axis(1)


@dataclass(frozen=True)
class View:
    """Columns ``first + sum(index * stride)`` of the rows of x, as axes in some order."""

    axes: tuple[Axis, ...]
    first: int = 0

    def reshaped(self, shape: Sequence[int | tirx.Expr]) -> View | None:
        """Return the view in another shape; None where an axis would mix rows and columns, or rows among themselves."""
        old = [axis for axis in self.axes if not axis.is_unit]
        out: list[Axis] = []
        for extent in map(number, shape):
            if isinstance(extent, int) and extent == 1:
                out.append(UNIT)
            elif not old:
                return None
            elif same_size(extent, old[0].extent):
                out.append(old.pop(0))
            elif not isinstance(extent, int) or (taken := _taken(old, extent)) is None:
                return None
            else:
                out.append(taken)
        return None if old else replace(self, axes=tuple(out))

    def transposed(self, order: Sequence[int] | None) -> View:
        """Return the view with axes in another order, reversed where none is given."""
        order = range(len(self.axes))[::-1] if order is None else [int(i) % len(self.axes) for i in order]
        return replace(self, axes=tuple(self.axes[i] for i in order))

    def cut(self, axis: int, begin: int, end: int) -> View | None:
        """Return a range of one axis; None along rows."""
        was = self.axes[axis]
        if not isinstance(was.extent, int) or was.row is not None:
            return None
        begin, end = (min(max(i + was.extent if i < 0 else i, 0), was.extent) for i in (begin, end))
        if end <= begin:
            return None
        now = UNIT if end - begin == 1 else replace(was, extent=end - begin)
        return View((*self.axes[:axis], now, *self.axes[axis + 1 :]), self.first + begin * was.stride)

    def without(self, axes: Sequence[int]) -> View | None:
        """Return the view without axes of size 1."""
        if not all(self.axes[i].is_unit for i in axes):
            return None
        dropped = {i % len(self.axes) for i in axes}
        return replace(self, axes=tuple(a for i, a in enumerate(self.axes) if i not in dropped))

    def expanded(self, axes: Sequence[int]) -> View:
        """Return the view with axes of size 1 at positions of the result."""
        rank = len(self.axes) + len(axes)
        new = {i % rank for i in axes}
        rest = iter(self.axes)
        return replace(self, axes=tuple(UNIT if i in new else next(rest) for i in range(rank)))


def _taken(old: list[Axis], extent: int) -> Axis | None:
    """Take an axis of a given extent off the front: part of the first one, or several that follow closely."""
    head = old[0]
    if head.row is not None or not isinstance(head.extent, int):
        return None
    while head.extent % extent:
        old.pop(0)
        if not old or old[0].row is not None or not isinstance(old[0].extent, int):
            return None
        if head.stride != old[0].stride * old[0].extent:
            return None
        head = Axis(head.extent * old[0].extent, None, old[0].stride)
    rest = head.extent // extent
    old[:1] = [] if rest == 1 else [replace(head, extent=rest)]
    return Axis(extent, None, head.stride * rest)


def columns_of(x_shape: Sequence[int | tirx.Expr], count: int) -> View:
    """Return the view that a linear layer of ``count`` columns makes of x."""
    rows = [number(extent) for extent in x_shape[:-1]]
    axes = [UNIT if isinstance(extent, int) and extent == 1 else Axis(extent, i) for i, extent in enumerate(rows)]
    return View((*axes, Axis(count, None, 1)))


def turns_into(view: View, other: View) -> bool:
    """Return whether two views have the very same axes, but for their order and those of size 1."""
    mine, its = ({id(a) for a in v.axes if not a.is_unit} for v in (view, other))
    return mine == its and view.first == other.first


def elements(axes: Sequence[Axis]) -> int:
    """Return the number of columns that axes run over."""
    return math.prod(int(a.extent) for a in axes if a.row is None)


def apply_view(view: View, call: relax.Call, op: str, shape: Sequence[tirx.Expr]) -> View | None:
    """Return what an operator that only moves values makes of a view; None where it is not such, or mixes axes."""
    if op == "relax.reshape":
        return view.reshaped(shape)
    if op == "relax.permute_dims":
        return view.transposed(call.attrs.axes)
    if op == "relax.squeeze":
        axes = call.attrs.axis
        chosen = [i for i, a in enumerate(view.axes) if a.is_unit] if axes is None else [int(i) for i in axes]
        return view.without(chosen)
    if op == "relax.expand_dims":
        return view.expanded([int(i) for i in call.attrs.axis])
    if op == "relax.strided_slice":
        return _sliced(view, call)
    if op == "relax.take":
        return _picked(view, call)
    return None


def _picked(view: View, call: relax.Call) -> View | None:
    """Return the view at a constant index of an axis, or at several in a row."""
    index = getattr(call.args[1], "value", None)
    if call.attrs.axis is None or index is None or not hasattr(index, "numpy"):
        return None
    places, axis = index.numpy(), int(call.attrs.axis) % len(view.axes)
    flat = [int(i) for i in places.reshape(-1)]
    if places.ndim > 1 or not flat or flat[0] < 0 or flat != list(range(flat[0], flat[0] + len(flat))):
        return None
    cut = view.cut(axis, flat[0], flat[-1] + 1)
    if cut is None or cut.axes[axis].extent != len(flat):
        return None
    return cut if places.ndim else cut.without((axis,))


def constants(value: relax.Expr) -> list[int] | None:
    """Return the numbers of a tuple, None where one is symbolic."""
    fields = getattr(value, "fields", ())
    numbers = [int(f) for f in fields if isinstance(f, tirx.IntImm)]
    return numbers if len(numbers) == len(fields) else None


def _sliced(view: View, call: relax.Call) -> View | None:
    parts = [constants(arg) for arg in call.args[1:]]
    if any(part is None for part in parts) or len(parts) < 3:
        return None
    axes, begins, ends = parts[:3]
    steps = parts[3] if len(parts) > 3 else [1] * len(axes or ())
    for axis, begin, end, step in zip(axes or (), begins or (), ends or (), steps or ()):
        if step != 1 or (cut := view.cut(axis % len(view.axes), begin, end)) is None:
            return None
        view = cut
    return view
