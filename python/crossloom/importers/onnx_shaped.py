"""Converters of operators whose result's shape is an operand: Reshape, Expand, ConstantOfShape, Range, Slice."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import onnx
from tvm import relax, tirx

from crossloom.errors import UnsupportedModel
from crossloom.importers.gather import known_sizes
from crossloom.importers.onnx_symbolic import MAX_ELEMENTS, ShapeMath, Value, boxed

op = relax.op


def shape_value(x: Any, attrs: dict[str, Any]) -> Value | None:
    """Evaluate Shape (with `start` and `end` since opset 15) of a tensor whose sizes are known."""
    dims = known_sizes(x)
    if dims is None:
        return None
    picked = dims[int(attrs.get("start", 0)) : attrs.get("end")]
    return Value(boxed(picked, (len(picked),)))


def size_value(m: ShapeMath, x: Any) -> Value | None:
    """Evaluate Size."""
    dims = known_sizes(x)
    if dims is None:
        return None
    return Value(boxed([_product(m, dims)], ()))


def reshape(m: ShapeMath, where: str, bb: Any, x: Any, target: Value, attrs: dict[str, Any]) -> Any:
    """Reshape to known sizes; -1 is what is left, 0 (unless `allowzero`) the input's size at that axis."""
    dims, wanted = known_sizes(x), target.list()
    if dims is None:
        if any(isinstance(d, int) and d == 0 for d in wanted) and not attrs.get("allowzero", 0):
            raise UnsupportedModel(f"{where}: copies a size that is unknown", "spell the shape out")
        return bb.emit(op.reshape(x, wanted))
    out: list[Any] = []
    for i, dim in enumerate(wanted):
        if isinstance(dim, int) and dim == 0 and not attrs.get("allowzero", 0):
            if i >= len(dims):
                raise UnsupportedModel(f"{where}: shape {wanted} copies a missing axis {i}", "correct the shape")
            dim = dims[i]
        if isinstance(dim, int) and dim < -1:
            raise UnsupportedModel(f"{where}: negative size in shape {wanted}", "correct the shape")
        out.append(dim)
    missing = [i for i, d in enumerate(out) if isinstance(d, int) and d == -1]
    if len(missing) > 1:
        raise UnsupportedModel(f"{where}: more than one -1 in shape {wanted}", "correct the shape")
    # Equal factors cancel exactly, also when they are symbolic and may be 0.
    have, rest = list(dims), [d for d in out if not (isinstance(d, int) and d == -1)]
    for dim in list(rest):
        match = next((h for h in have if m.same(h, dim)), None)
        if match is not None:
            have.pop(next(i for i, h in enumerate(have) if h is match))
            rest.pop(next(i for i, r in enumerate(rest) if r is dim))
    total, left = _product(m, have), _product(m, rest)
    fixed = isinstance(total, int) and isinstance(left, int)
    if missing:
        if isinstance(left, int) and left == 0:
            raise UnsupportedModel(f"{where}: -1 beside a size 0 in shape {wanted}", "spell the size out")
        if fixed and total % left:
            raise UnsupportedModel(f"{where}: {dims} does not divide into {wanted}", "correct the shape")
        out[missing[0]] = m.divide(total, left)
    elif fixed and total != left:
        raise UnsupportedModel(f"{where}: {dims} cannot take shape {wanted}", "correct the shape")
    return bb.emit(op.reshape(x, out))


def _product(m: ShapeMath, dims: list[Any]) -> Any:
    total: Any = 1
    for dim in dims:
        total = m.simplify(total * dim)
    return total


def expand(m: ShapeMath, where: str, bb: Any, x: Any, target: Value) -> Any:
    """Broadcast x and a tensor of the known sizes `target` against each other."""
    dims, wanted = known_sizes(x), target.list()
    if dims is None:
        raise UnsupportedModel(f"{where}: the shape of its input is unknown", "export with shape inference")
    rank = max(len(dims), len(wanted))
    dims, wanted = [1] * (rank - len(dims)) + dims, [1] * (rank - len(wanted)) + wanted
    out = []
    for axis, (have, want) in enumerate(zip(dims, wanted)):
        one = isinstance(want, int) and want in (1, -1)
        if one or m.same(have, want) or (isinstance(have, int) and have != 1 and not isinstance(want, int)):
            out.append(have)
        elif isinstance(have, int) and have == 1:
            out.append(want)
        else:
            raise UnsupportedModel(
                f"{where}: cannot tell that size {have} of axis {axis} fits {want}",
                "give both dimensions one name, or fix them with input_shapes",
            )
    return bb.emit(op.broadcast_to(x, out))


def filled_value(target: Value, attrs: dict[str, Any]) -> Value | None:
    """Return known sizes filled with an integer; None for floats and for large tensors."""
    fill = onnx.numpy_helper.to_array(attrs["value"]) if "value" in attrs else np.zeros(1, "float32")
    if prod(target.list()) > MAX_ELEMENTS:
        return None
    return Value.of(np.full(target.list(), fill.reshape(()), fill.dtype))


def constant_of_shape(bb: Any, target: Value, attrs: dict[str, Any]) -> Any:
    """Fill known sizes with one value, a float32 0 unless given."""
    fill = onnx.numpy_helper.to_array(attrs["value"]) if "value" in attrs else np.zeros(1, "float32")
    dtype = fill.dtype.name
    return bb.emit(op.full(relax.ShapeExpr(target.list()), relax.const(fill.reshape(()), dtype), dtype))


def arange(m: ShapeMath, where: str, bb: Any, inputs: list[Value]) -> Any:
    """Range over known integers, some symbolic."""
    start, limit, step = (v.list()[0] for v in inputs)
    if not isinstance(step, int) or step == 0:
        raise UnsupportedModel(f"{where}: its step is symbolic or 0", "use a fixed step")
    # Relax takes the extent as (limit - start) / step, which must not turn negative.
    limit = m.maximum(start, limit) if step > 0 else m.minimum(start, limit)
    x = bb.emit(op.arange(start, limit, step, "int64"))
    return x if inputs[0].dtype == "int64" else bb.emit(op.astype(x, inputs[0].dtype))


def forward_over_symbols(x: Any, operands: list[Value | None]) -> bool:
    """Tell whether a Slice runs forward over an axis of symbolic size: TVM's own result shape is opaque there."""
    dims = known_sizes(x)
    if dims is None or len(operands) < 3 or operands[1] is None:
        return False
    axes = operands[3].list() if len(operands) > 3 and operands[3] is not None else range(operands[1].items.size)
    steps = operands[4].list() if len(operands) > 4 and operands[4] is not None else []
    known = all(isinstance(a, int) and -len(dims) <= a < len(dims) for a in axes)
    return known and all(s > 0 for s in steps) and any(not isinstance(dims[a], int) for a in axes)


def strided_slice(m: ShapeMath, where: str, bb: Any, x: Any, parts: list[Value | None]) -> Any:
    """Slice with known bounds, some symbolic, clamped to the tensor as ONNX defines it.

    Parameters
    ----------
    parts : list of Value or None
        starts, ends, axes, steps.
    """
    dims = known_sizes(x)
    starts, ends = (v.list() if v is not None else [] for v in parts[:2])
    axes = parts[2].list() if len(parts) > 2 and parts[2] is not None else list(range(len(starts)))
    steps = parts[3].list() if len(parts) > 3 and parts[3] is not None else [1] * len(starts)
    if dims is None or not all(isinstance(v, int) and v > 0 for v in steps):
        raise UnsupportedModel(
            f"{where}: symbolic bounds need a known shape and fixed positive steps", "use fixed bounds"
        )
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise UnsupportedModel(f"{where}: starts, ends, axes and steps differ in length", "export it again")
    if not all(isinstance(a, int) and -len(dims) <= a < len(dims) for a in axes):
        raise UnsupportedModel(f"{where}: axes {axes} do not fit rank {len(dims)}", "correct the axes")
    axes = [a % len(dims) for a in axes]

    def clamp(bound: Any, dim: Any) -> Any:
        if isinstance(bound, int) and bound >= 2**31 - 1:
            return dim  # "to the end"
        if isinstance(bound, int):
            bound = bound + dim if bound < 0 else bound
        elif not m.proves(bound >= 0):
            bound = dim + bound if m.proves(bound < 0) else tirx.Select(bound < 0, bound + dim, bound)
        return m.maximum(0, m.minimum(m.simplify(bound), dim))

    begin = [clamp(b, dims[a]) for b, a in zip(starts, axes)]
    end = [clamp(e, dims[a]) for e, a in zip(ends, axes)]
    # A begin is at most its dimension already.
    end = [e if m.same(e, dims[a]) else m.maximum(b, e) for b, e, a in zip(begin, end, axes)]
    prim = lambda values: [relax.prim_value(v) for v in values]
    return bb.emit(op.strided_slice(x, axes, prim(begin), prim(end), prim(steps), assume_inbound=True))


def select(m: ShapeMath, where: str, bb: Any, flag: Any, first: Any, second: Any) -> Any:
    """Choose between two tensors of one type by a boolean tensor of one element."""
    shapes, types = [known_sizes(x) for x in (first, second)], [str(x.ty.dtype) for x in (first, second)]
    told = " and ".join(f"{dtype}{dims}" for dtype, dims in zip(types, shapes))
    a, b = shapes
    equal = a is not None and b is not None and len(a) == len(b) and all(m.same(x, y) for x, y in zip(a, b))
    if not equal or types[0] != types[1]:
        raise UnsupportedModel(
            f"{where}: its branches return {told}, and which one is taken is known at run time only",
            "make both branches return one type and shape, or fix the condition before exporting",
        )
    dims = known_sizes(flag)
    if dims:
        if dims != [1] * len(dims):
            raise UnsupportedModel(f"{where}: its condition has shape {dims}", "use a condition of one element")
        flag = bb.emit(op.reshape(flag, []))
    return bb.emit(op.where(flag, first, second))
