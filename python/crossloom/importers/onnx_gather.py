"""Gather, GatherElements, GatherND and OneHot: negative indices count from the end, none leaves the tensor.

The standard leaves an index outside ``-size .. size - 1`` undefined; here it reads the nearest element.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax

from crossloom.errors import UnsupportedModel
from crossloom.importers.gather import bounded, known_sizes, padded, safe_take, size_tensor
from crossloom.importers.onnx_contrib import Call, Converter, dtype_of

op = relax.op


def _data(c: Call) -> tuple[Any, list[Any]]:
    """Return the first operand as a tensor, and its sizes."""
    x = c.need(0)
    if isinstance(x.ty, relax.ShapeType):
        x = c.emit(op.shape_to_tensor(x))
    sizes = known_sizes(x)
    if sizes is None:
        raise UnsupportedModel(f"{c.where}: the shape of its input is unknown", "export with shape inference")
    return x, sizes


def _indices(c: Call) -> Any:
    indices = c.need(1)
    return c.emit(op.shape_to_tensor(indices)) if isinstance(indices.ty, relax.ShapeType) else indices


def _axis(c: Call, rank: int) -> int:
    axis = int(c.attrs.get("axis", 0))
    if not -rank <= axis < rank:
        raise UnsupportedModel(f"{c.where}: axis {axis} does not fit rank {rank}", "correct the axis")
    return axis % rank


def _refuse_empty(c: Call, size: Any, indices: Any) -> None:
    """An axis without elements has nothing to read, unless nothing is asked of it."""
    wanted = known_sizes(indices)
    if isinstance(size, int) and size == 0 and (wanted is None or 0 not in wanted):
        raise UnsupportedModel(f"{c.where}: gathers from an axis of size 0", "correct the shapes")


def gather(c: Call) -> list[Any]:
    """Gather along one axis; of constants, a constant."""
    (x, sizes), indices = _data(c), _indices(c)
    axis = _axis(c, len(sizes))
    _refuse_empty(c, sizes[axis], indices)
    if isinstance(x, tvm.ir.GenericConst) and isinstance(indices, tvm.ir.GenericConst):
        at = bounded(c.emit, indices, [sizes[axis]], from_end=True).value.numpy().astype("int64")
        value = np.take(x.value.numpy(), at, axis=axis)
        return [relax.const(value, dtype_of(x))]
    return [c.emit(safe_take(c.emit, x, indices, axis, from_end=True))]


def gather_elements(c: Call) -> list[Any]:
    """GatherElements: one index an element."""
    (x, sizes), indices = _data(c), _indices(c)
    axis = _axis(c, len(sizes))
    _refuse_empty(c, sizes[axis], indices)
    at = bounded(c.emit, indices, [sizes[axis]], from_end=True)
    return [c.emit(op.gather_elements(padded(c.emit, x, [axis]), at, axis))]


def gather_nd(c: Call) -> list[Any]:
    """GatherND: the last axis of the indices, which must be fixed, holds an index for each axis behind the batch's."""
    (x, sizes), indices = _data(c), _indices(c)
    first, columns = int(c.attrs.get("batch_dims", 0)), known_sizes(indices)
    if not columns or not isinstance(columns[-1], int) or not 0 <= first <= len(sizes) - columns[-1]:
        raise UnsupportedModel(
            f"{c.where}: indices of shape {columns} with batch_dims={first} do not fit rank {len(sizes)}",
            "correct the indices; their last axis must be fixed",
        )
    limits = sizes[first : first + columns[-1]]
    for limit in limits:
        _refuse_empty(c, limit, indices)
    at = bounded(c.emit, indices, limits, from_end=True) if limits else indices
    at = at if dtype_of(at) == "int64" else c.emit(op.astype(at, "int64"))
    return [c.emit(op.gather_nd(padded(c.emit, x, range(first, first + columns[-1])), at, first))]


def one_hot(c: Call) -> list[Any]:
    """OneHot: the on value where an index says, the off value elsewhere; an index out of range is nowhere."""
    indices, values = c.need(0), c.need(2)
    known = c.known[1].list() if c.known[1] is not None else []
    depth = known[0] if len(known) == 1 else c.arrays[1].reshape(-1)[0] if c.arrays[1] is not None else None
    if depth is None or known_sizes(values) != [2]:
        raise UnsupportedModel(f"{c.where}: needs a known depth and two values", "store the depth as an initializer")
    depth = int(depth) if not isinstance(depth, tvm.ir.Expr) else depth
    rank = indices.ty.ndim + 1
    axis = int(c.attrs.get("axis", -1))
    if not -rank <= axis < rank:
        raise UnsupportedModel(f"{c.where}: axis {axis} does not fit rank {rank}", "correct the axis")
    axis %= rank
    at = indices if dtype_of(indices) == "int64" else c.emit(op.astype(indices, "int64"))
    extent = c.emit(op.reshape(size_tensor(c.emit, [depth]), []))
    below = c.emit(op.less(at, relax.const(0, "int64")))
    at = c.emit(op.expand_dims(c.emit(op.where(below, c.emit(op.add(at, extent)), at)), axis))
    lanes = c.emit(
        op.reshape(c.emit(op.arange(0, depth, 1, "int64")), [depth if i == axis else 1 for i in range(rank)])
    )
    pair: list[Any]
    if c.arrays[2] is not None:
        # Known values tell passes what stands for a class.
        pair = [relax.const(value, dtype_of(values)) for value in c.arrays[2].reshape(-1)]
    else:
        pair = [c.emit(op.reshape(c.emit(op.strided_slice(values, [0], [i], [i + 1])), [])) for i in range(2)]
    return [c.emit(op.where(c.emit(op.equal(at, lanes)), pair[1], pair[0]))]


GATHERS: dict[tuple[str, str], Converter] = {
    ("", "Gather"): gather,
    ("", "GatherElements"): gather_elements,
    ("", "GatherND"): gather_nd,
    ("", "OneHot"): one_hot,
}
