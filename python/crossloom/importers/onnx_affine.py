"""QuantizeLinear and DequantizeLinear of run-time tensors: per tensor, per axis, blocked, 4 to 32 bits."""

from __future__ import annotations

from typing import Any

from onnx import TensorProto
from tvm import relax

from crossloom.errors import UnsupportedModel
from crossloom.importers.onnx_contrib import Call, Converter, dims_of, dtype_of

op = relax.op
#: Element type -> (type we hold it in, least, largest).  4-bit values take a byte each.
_RANGES = {
    TensorProto.INT4: ("int8", -8, 7),
    TensorProto.UINT4: ("uint8", 0, 15),
    TensorProto.INT8: ("int8", -128, 127),
    TensorProto.UINT8: ("uint8", 0, 255),
    TensorProto.INT16: ("int16", -32768, 32767),
    TensorProto.UINT16: ("uint16", 0, 65535),
}
_BY_DTYPE = {
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "int16": TensorProto.INT16,
    "uint16": TensorProto.UINT16,
}


def _spread(c: Call, table: Any, x: Any) -> Any:
    """Bring a scale or zero point into a shape that broadcasts against x."""
    rank, dims = x.ty.ndim, dims_of(table)
    block = int(c.attrs.get("block_size", 0))
    axis = int(c.attrs.get("axis", 1))
    if not dims or (dims == [1] and not block):
        return c.emit(op.reshape(table, []))
    axis = 0 if rank == 1 and axis == 1 else axis
    if not -rank <= axis < rank:
        raise UnsupportedModel(f"{c.where}: axis {axis} does not fit rank {rank}", "correct the axis")
    axis %= rank
    sizes = dims_of(x)
    if not block:
        if len(dims) != 1 or (all(isinstance(d, int) for d in (dims[0], sizes[axis])) and dims[0] != sizes[axis]):
            raise UnsupportedModel(
                f"{c.where}: scale of shape {dims} does not fit data of shape {sizes} (axis {axis})",
                "give one scale, or one per index of the axis",
            )
        return c.emit(op.reshape(table, [dims[0] if i == axis else 1 for i in range(rank)]))
    if not isinstance(sizes[axis], int) or block < 0 or len(dims) != rank or dims[axis] != -(-sizes[axis] // block):
        raise UnsupportedModel(
            f"{c.where}: scale of shape {dims} does not fit data of shape {sizes} (axis {axis}, block_size {block})",
            "correct the scale, the axis or the block size; the blocked axis must be fixed",
        )
    wide = c.emit(op.repeat(table, block, axis))
    if dims[axis] * block != sizes[axis]:
        wide = c.emit(op.strided_slice(wide, [axis], [0], [sizes[axis]]))
    return wide


def quantize_linear(c: Call) -> list[Any]:
    """``clip(round_half_even(x / scale) + zero_point)``, Source: the ONNX operator's documentation."""
    c.refuse(precision=0)
    x, scale, zero = c.need(0), c.need(1), c.arg(2)
    given = _BY_DTYPE.get(dtype_of(zero), 0) if zero is not None else TensorProto.UINT8
    kind = int(c.attrs.get("output_dtype", 0)) or given
    if kind not in _RANGES or (zero is not None and _RANGES[kind][0] != dtype_of(zero)):
        raise UnsupportedModel(
            f"{c.where}: output type {kind} with a zero point of "
            f"{'no type' if zero is None else dtype_of(zero)} is not supported",
            "quantize to 4, 8 or 16 bit integers with a zero point of the same type",
        )
    dtype, least, largest = _RANGES[kind]
    wide = x if dtype_of(x) == "float32" else c.emit(op.astype(x, "float32"))
    s = _spread(c, c.emit(op.astype(scale, "float32")), x)
    y = c.emit(op.round(c.emit(op.divide(wide, s))))
    if zero is not None:
        y = c.emit(op.add(y, _spread(c, c.emit(op.astype(zero, "float32")), x)))
    return [c.emit(op.astype(c.emit(op.clip(y, least, largest)), dtype))]


def dequantize_linear(c: Call) -> list[Any]:
    """``(x - zero_point) * scale`` in float32, in the dtype of the scale."""
    x, scale, zero = c.need(0), c.need(1), c.arg(2)
    if dtype_of(x) not in (*_BY_DTYPE, "int32") or dtype_of(scale) not in ("float32", "float16", "bfloat16"):
        raise UnsupportedModel(
            f"{c.where}: {dtype_of(x)} with a scale of {dtype_of(scale)} is not supported",
            "dequantize integers of 4 to 32 bits to float32, float16 or bfloat16",
        )
    target = dtype_of(scale)
    if c.attrs.get("output_dtype", 0):
        target = {1: "float32", 10: "float16", 16: "bfloat16"}.get(int(c.attrs["output_dtype"]), target)
    y = x
    if zero is not None:
        # In int32 the difference is exact; float32 would round what lies beyond 2**24.
        zero = _spread(c, c.emit(op.astype(zero, "int32")), x)
        y = c.emit(op.subtract(c.emit(op.astype(x, "int32")), zero))
    y = c.emit(op.astype(y, "float32"))
    y = c.emit(op.multiply(y, _spread(c, c.emit(op.astype(scale, "float32")), x)))
    return [y if target == "float32" else c.emit(op.astype(y, target))]


AFFINE: dict[tuple[str, str], Converter] = {
    (domain, name): fn
    for domain in ("", "com.microsoft")
    for name, fn in (("QuantizeLinear", quantize_linear), ("DequantizeLinear", dequantize_linear))
}
