"""Reductions whose type or range TVM's converters get wrong: integers, booleans, and sums of float16 products."""

from __future__ import annotations

from typing import Any

from tvm import relax

from crossloom.errors import UnsupportedModel
from crossloom.importers.gather import known_sizes, size_tensor
from crossloom.importers.onnx_contrib import Call, Converter, dtype_of
from crossloom.importers.onnx_delegate import by_tvm

op = relax.op
#: Their terms or their sum leave float16 where the result does not; they are worked out in float32.
_WIDE = ("ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp")
_ROOTS = ("ReduceL2", "ReduceLogSum", "ReduceLogSumExp")


def _axes(c: Call) -> list[int] | None:
    """Return the axes reduced over; None where the node reduces nothing (`noop_with_empty_axes`)."""
    x = c.need(0)
    axes = list(c.attrs.get("axes", ()))
    if c.arg(1) is not None:
        if c.known[1] is None or not c.known[1].constant:
            raise UnsupportedModel(f"{c.where}: its axes are known at run time only", "store them as an initializer")
        axes = c.known[1].list()
    if not axes:
        return None if c.attrs.get("noop_with_empty_axes", 0) else list(range(x.ty.ndim))
    return [int(axis) % max(x.ty.ndim, 1) for axis in axes]


def _integer_mean(c: Call) -> list[Any]:
    """Mean of integers in their own type, rounded towards zero as ONNX Runtime's."""
    x, axes, sizes = c.need(0), _axes(c), known_sizes(c.need(0))
    if axes is None:
        return [x]
    if sizes is None:
        raise UnsupportedModel(f"{c.where}: the shape of its input is unknown", "export with shape inference")
    total = c.emit(op.sum(c.emit(op.astype(x, "int64")), axes, bool(c.attrs.get("keepdims", 1))))
    count: Any = relax.const(1, "int64")
    for axis in axes:
        size = c.emit(op.reshape(size_tensor(c.emit, [sizes[axis]]), []))
        count = c.emit(op.multiply(count, size))
    return [c.emit(op.astype(c.emit(op.divide(total, count)), dtype_of(x)))]


def _reduction(op_type: str) -> Converter:
    def convert(c: Call) -> list[Any]:
        x = c.need(0)
        dtype = dtype_of(x)
        integer = dtype.startswith(("int", "uint"))
        through = ""
        if op_type == "ReduceMean" and integer:
            return _integer_mean(c)
        if op_type in _WIDE and dtype in ("float16", "bfloat16"):
            through = "float32"
        elif op_type in _ROOTS and integer:
            through = "float64"
        elif dtype == "bool":
            through = "int8"
        if not through or _axes(c) is None:
            return [by_tvm(c, op_type)]
        y = by_tvm(c, op_type, [c.emit(op.astype(x, through)), *c.inputs[1:]])
        return [c.emit(op.astype(y, dtype))]

    return convert


REDUCTIONS: dict[tuple[str, str], Converter] = {
    ("", name): _reduction(name) for name in (*_WIDE, "ReduceMean", "ReduceMax", "ReduceMin")
}
