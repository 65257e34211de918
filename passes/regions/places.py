"""Where the elements that an attention reads lie in the tensors behind views, concatenations and repeated heads.

An index of a tensor's axis is ``offset + sum(stride * role)``; a view maps such indices to others of the same kind, or
is not followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import relax

from crossloom.rewrite import Graph
from crossloom.schedules.attention import Axis, Extent, Operand

from ..matching.lanes import NotLanes, slices
from ..matching.lines import proved
from ..matching.spelling import dims, dtype, extents, fields_of, number, scalar

_KEY = Axis((("key", 1),))
_MOVES = (
    "relax.reshape",
    "relax.permute_dims",
    "relax.expand_dims",
    "relax.squeeze",
    "relax.strided_slice",
    "relax.take",
)
_BEHIND = ("relax.reshape", "relax.permute_dims", "relax.expand_dims", "relax.squeeze")


@dataclass(frozen=True)
class Place:
    """A tensor and which of its elements are meant.

    Attributes
    ----------
    value : relax.Expr
    axes : tuple of Axis
    keys : int, tvm.tirx.Expr or None
        Keys that lie in it, where it is one part of several.
    """

    value: relax.Expr
    axes: tuple[Axis, ...]
    keys: Extent | None = None

    @property
    def operand(self) -> Operand:
        """The same, for a kernel."""
        return Operand(tuple(extents(self.value)), self.axes, dtype(self.value))


def same(a: Extent, b: Extent) -> bool:
    """Return whether two extents are equal, whatever the symbolic dimensions are."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return proved(a <= b) and proved(b <= a)


def _times(axis: Axis, factor: Extent) -> Axis:
    return Axis(tuple((role, stride * factor) for role, stride in axis.terms), axis.offset * factor)


def _plus(a: Axis, b: Axis) -> Axis:
    return Axis((*a.terms, *b.terms), a.offset + b.offset)


def _merged(axes: Sequence[Axis], sizes: Sequence[Extent], shape: Sequence[Extent]) -> tuple[Axis, ...] | None:
    """Return the indices in a tensor each of whose axes is one of ``axes``, or neighbours of them in one."""
    left = [pair for pair in zip(axes, sizes) if pair[1] != 1 or not isinstance(pair[1], int)]
    out: list[Axis] = []
    for extent in shape:
        if isinstance(extent, int) and extent == 1:
            out.append(Axis())
            continue
        if not left:
            return None
        axis, size = left.pop(0)
        while not same(size, extent):
            if not left:
                return None
            after, count = left.pop(0)
            axis, size = _plus(_times(axis, count), after), size * count
        out.append(axis)
    return None if left else tuple(out)


def _permutation(call: relax.Call, rank: int) -> list[int]:
    axes = call.attrs.axes
    return [int(a) % rank for a in axes] if axes is not None else list(range(rank))[::-1]


def _back(graph: Graph, expr: relax.Expr, axes: tuple[Axis, ...]) -> tuple[relax.Expr, tuple[Axis, ...] | None] | None:
    """Return what a view is of, and the indices in that."""
    value = graph.resolve(expr)
    if isinstance(value, relax.TupleGetItem):
        return _field(graph, value, axes)
    call = graph.call(expr, *_MOVES)
    if call is None:
        return None
    source, name = call.args[0], call.op.name
    old, new = extents(source), extents(expr)
    if name == "relax.reshape":
        return source, _merged(axes, new, old)
    if name == "relax.permute_dims":
        order = _permutation(call, len(axes))
        return source, tuple(axes[order.index(i)] for i in range(len(axes)))
    if name == "relax.strided_slice":
        return source, _sliced(call, axes)
    if name == "relax.take":
        return source, _taken(graph, call, old, axes)
    if name == "relax.expand_dims":
        added = {int(a) % len(axes) for a in call.attrs.axis}
        return source, tuple(axis for i, axis in enumerate(axes) if i not in added)
    gone = call.attrs.axis
    removed = {i for i, d in enumerate(old) if d == 1} if gone is None else {int(a) % len(old) for a in gone}
    rest = iter(axes)
    return source, tuple(Axis() if i in removed else next(rest) for i in range(len(old)))


def _sliced(call: relax.Call, axes: tuple[Axis, ...]) -> tuple[Axis, ...] | None:
    try:
        cuts = slices(call)
    except NotLanes:
        return None
    out = list(axes)
    for axis, cut in cuts:
        at = axis % len(axes)
        out[at] = _plus(_times(out[at], cut.step), Axis((), cut.start))
    return tuple(out)


def _taken(graph: Graph, call: relax.Call, shape: Sequence[Extent], axes: tuple[Axis, ...]) -> tuple[Axis, ...] | None:
    """Return the indices where one place of an axis is taken: a layer's cache out of a stack of them."""
    index, axis = scalar(graph, call.args[1]), call.attrs.axis
    if index is None or axis is None or dims(call.args[1]) is None:
        return None
    at, place = int(axis) % len(shape), int(index)
    extent = shape[at]
    if not isinstance(extent, int) or not 0 <= place < extent:
        return None
    rest = axes if len(axes) < len(shape) else (*axes[:at], *axes[at + 1 :])
    return (*rest[:at], Axis((), place), *rest[at:]) if len(rest) + 1 == len(shape) else None


def _field(
    graph: Graph, value: relax.TupleGetItem, axes: tuple[Axis, ...]
) -> tuple[relax.Expr, tuple[Axis, ...] | None] | None:
    """Return what a part of a split is of."""
    call = graph.call(value.tuple_value, "relax.split")
    if call is None:
        return None
    at = int(call.attrs.axis) % len(axes)
    before = [number(list(ty.shape)[at]) for ty in list(value.tuple_value.ty.fields)[: value.index]]
    start: Extent = sum(before)
    return call.args[0], (*axes[:at], _plus(axes[at], Axis((), start)), *axes[at + 1 :])


class Tracer:
    """Follows operands of one call backwards, and its result forwards, within the call's block.

    Parameters
    ----------
    graph : Graph
    core : relax.Var
        The call.
    views : bool
        Whether anything is followed.
    """

    def __init__(self, graph: Graph, core: relax.Var, views: bool = True) -> None:
        self.graph, self.core, self.views = graph, core, views

    def _follows(self, expr: relax.Expr) -> bool:
        graph = self.graph
        if not self.views:
            return False
        if not isinstance(expr, relax.Var) or expr not in graph.value or expr in graph.casts:
            return False
        return graph.scope[expr] == graph.scope[self.core] and graph.block.get(expr) == graph.block.get(self.core)

    def source(self, expr: relax.Expr, axes: tuple[Axis, ...]) -> Place:
        """Return the tensor farthest back in which lanes are neighbours, if they are in the operand itself."""
        found = at = Place(expr, axes)
        wanted = at.operand.runs_along("lane")
        while self._follows(at.value):
            step = _back(self.graph, at.value, at.axes)
            if step is None or step[1] is None:
                break
            at = Place(step[0], step[1])
            if at.operand.runs_along("lane") or not wanted:
                found = at
        return found

    def parts(self, expr: relax.Expr, axes: tuple[Axis, ...]) -> list[Place]:
        """Return where keys or values lie: in one tensor, or in a cache and what is appended to it."""
        found = self.source(expr, axes)
        call = self.graph.call(found.value, "relax.concat") if self._follows(found.value) else None
        if call is None or call.attrs.axis is None:
            return [found]
        fields = fields_of(self.graph, call.args[0])
        at = int(call.attrs.axis) % len(found.axes)
        if len(fields) != 2 or found.axes[at] != _KEY:
            return [found]
        if any(role == "key" for i, axis in enumerate(found.axes) if i != at for role, _ in axis.terms):
            return [found]
        return [replace(self.source(field, found.axes), keys=extents(field)[at]) for field in fields]

    def result(self, axes: tuple[Axis, ...]) -> Place:
        """Return the view farthest on of the result in which lanes are neighbours."""
        graph = self.graph
        found = at = Place(self.core, axes)
        while graph.uses(at.value) == 1 and at.value not in graph.escapes:
            (user,) = set(graph.users[at.value])
            call = graph.call(user, *_BEHIND)
            if call is None or not self._follows(user) or not call.args[0].same_as(at.value):
                break
            seen = _forth(call, user, at.axes)
            if seen is None:
                break
            at = Place(user, seen)
            if at.operand.runs_along("lane"):
                found = at
        return found


def _forth(call: relax.Call, view: relax.Var, axes: tuple[Axis, ...]) -> tuple[Axis, ...] | None:
    """Return the indices in a view."""
    name, old, new = call.op.name, extents(call.args[0]), extents(view)
    if name == "relax.permute_dims":
        return tuple(axes[i] for i in _permutation(call, len(axes)))
    # The others only change how axes are counted.
    return _merged(axes, old, new)
