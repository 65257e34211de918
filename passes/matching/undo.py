"""Undoing operators that move elements: from an element of the result to the element of the operand it was."""

from __future__ import annotations

from typing import Protocol

from tvm import relax

from crossloom.rewrite import Graph

from .lanes import slices
from .moves import Index, Place, affine, divided, extent, modulo, reshape_index
from .spelling import dims, fields_of, sizes

#: The operand and the place in it.
At = tuple[relax.Expr, Index]


class Unknown(Exception):
    """The operator, or this use of it, is not followed."""


class Reader(Protocol):
    """What undoing needs to know of the function around."""

    graph: Graph

    def place(self, indices: relax.Expr, index: Index) -> Place:
        """Return the place that an element of an index tensor names."""


def axis_of(axis: int, rank: int) -> int:
    """Return an axis counted from the left."""
    return axis + rank if axis < 0 else axis


def plain(field: object) -> float:
    """Return a constant operand's value."""
    value = getattr(field, "value", field)
    if not isinstance(value, (int, float)):
        raise Unknown
    return float(value)


def _reshape(e: Reader, call: relax.Call, index: Index) -> At | None:
    at = reshape_index(index, dims(call.args[0]) or [], dims(call) or [])
    return None if at is None else (call.args[0], at)


def _permute(e: Reader, call: relax.Call, index: Index) -> At:
    axes = call.attrs.axes
    order = [axis_of(int(a), len(index)) for a in axes] if axes is not None else list(range(len(index)))[::-1]
    return call.args[0], tuple(index[order.index(n)] for n in range(len(index)))


def _broadcast(e: Reader, call: relax.Call, index: Index) -> At:
    rank = len(dims(call.args[0]) or ())
    return call.args[0], index[len(index) - rank :]


def _slice(e: Reader, call: relax.Call, index: Index) -> At:
    at = list(index)
    for axis, cut in slices(call):
        at[axis_of(axis, len(at))] = affine(at[axis_of(axis, len(at))], cut.start, cut.step)
    return call.args[0], tuple(at)


def _concat(e: Reader, call: relax.Call, index: Index) -> At | None:
    fields = fields_of(e.graph, call.args[0])
    if not fields or call.attrs.axis is None:
        return None
    axis = axis_of(int(call.attrs.axis), len(index))
    place = index[axis]
    for field in fields:
        size = (sizes(field) or [None] * len(index))[axis]
        if not isinstance(place, int) or size is None:
            return None
        if place < size:
            return field, (*index[:axis], place, *index[axis + 1 :])
        place -= size
    return None


def _stack(e: Reader, call: relax.Call, index: Index) -> At | None:
    fields = fields_of(e.graph, call.args[0])
    axis = axis_of(int(call.attrs.axis or 0), len(index))
    if not isinstance(index[axis], int) or not fields:
        return None
    return fields[index[axis]], (*index[:axis], *index[axis + 1 :])


def _take(e: Reader, call: relax.Call, index: Index) -> At | None:
    data, indices = call.args
    size = sizes(data)
    if call.attrs.axis is None or size is None or dims(indices) is None:
        return None
    axis, rank = axis_of(int(call.attrs.axis), len(size)), len(dims(indices) or ())
    place = e.place(indices, index[axis : axis + rank])
    if isinstance(place, int) and place >= (size[axis] or 0):
        return None
    return data, (*index[:axis], place, *index[axis + rank :])


def _gather(e: Reader, call: relax.Call, index: Index) -> At | None:
    axis = axis_of(int(call.attrs.axis), len(index))
    size = (sizes(call.args[0]) or [None] * len(index))[axis]
    place = e.place(call.args[1], index)
    if isinstance(place, int) and place >= (size or 0):
        return None
    return call.args[0], (*index[:axis], place, *index[axis + 1 :])


def _repeat(e: Reader, call: relax.Call, index: Index) -> At | None:
    if call.attrs.axis is None:
        return None
    axis, times = axis_of(int(call.attrs.axis), len(index)), (int(call.attrs.repeats), ())
    return call.args[0], (*index[:axis], divided(index[axis], times), *index[axis + 1 :])


def _tile(e: Reader, call: relax.Call, index: Index) -> At | None:
    data, times = dims(call.args[0]) or [], [int(r) for r in call.attrs.repeats]
    times = [1] * (len(data) - len(times)) + times
    times, at = times[len(times) - len(data) :], list(index[len(index) - len(data) :])
    for axis, (size, n) in enumerate(zip(data, times)):
        if n != 1:
            wide = extent(size)
            if wide is None:
                return None
            at[axis] = modulo(at[axis], wide)
    return call.args[0], tuple(at)


def _scatter(e: Reader, call: relax.Call, index: Index) -> At | None:
    """Return the element of a tensor some of whose slices were overwritten."""
    data, source = call.args[:2]
    begin, end, step = (int(plain(a)) for a in call.args[2:5])
    axis = axis_of(int(call.attrs.axis), len(index))
    place = index[axis]
    if not isinstance(place, int) or begin < 0 or end < 0 or step < 1:
        return None
    if begin <= place < end and (place - begin) % step == 0:
        return source, (*index[:axis], (place - begin) // step, *index[axis + 1 :])
    return data, index


MOVES = {
    "relax.reshape": _reshape,
    "relax.expand_dims": _reshape,
    "relax.squeeze": _reshape,
    "relax.flatten": _reshape,
    "relax.permute_dims": _permute,
    "relax.broadcast_to": _broadcast,
    "relax.strided_slice": _slice,
    "relax.concat": _concat,
    "relax.stack": _stack,
    "relax.take": _take,
    "relax.gather_elements": _gather,
    "relax.repeat": _repeat,
    "relax.tile": _tile,
    "relax.slice_scatter": _scatter,
}
