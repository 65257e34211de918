"""MaxPool, AveragePool and LpPool with automatic padding, and MaxUnpool."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from crossloom.errors import UnsupportedModel
from crossloom.importers.gather import known_sizes
from crossloom.importers.onnx_contrib import Call, Converter, dtype_of
from crossloom.importers.onnx_delegate import by_tvm

op = relax.op


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _same_pads(c: Call, lower: bool) -> list[int]:
    """Return the pads (all begins, then all ends) that make the output ``ceil(size / stride)`` along every axis.

    Source: `auto_pad` in the documentation of the ONNX operator MaxPool.
    """
    dims, kernel = known_sizes(c.need(0)), [int(k) for k in c.attrs["kernel_shape"]]
    if dims is None or len(dims) != len(kernel) + 2:
        raise UnsupportedModel(f"{c.where}: kernel {kernel} does not fit shape {dims}", "correct kernel_shape")
    strides = [int(s) for s in c.attrs.get("strides", [1] * len(kernel))]
    dilations = [int(d) for d in c.attrs.get("dilations", [1] * len(kernel))]
    first, last = [], []
    for axis, (size, width, stride, dilation) in enumerate(zip(dims[2:], kernel, strides, dilations)):
        reach = (width - 1) * dilation + 1
        if isinstance(size, int):
            total = max((-(-size // stride) - 1) * stride + reach - size, 0)
        elif stride == 1:
            total = reach - 1
        else:
            raise UnsupportedModel(
                f"{c.where}: automatic padding of axis {axis + 2}, whose size {size} is symbolic, with stride {stride}",
                "fix the size with input_shapes, or give pads",
            )
        less, more = total // 2, total - total // 2
        first.append(more if lower else less)
        last.append(less if lower else more)
    return first + last


def _pool(op_type: str) -> Converter:
    def convert(c: Call) -> list[Any]:
        attrs = dict(c.attrs)
        mode = _text(attrs.pop("auto_pad", "NOTSET"))
        if mode in ("SAME_UPPER", "SAME_LOWER"):
            attrs["pads"] = tuple(_same_pads(c, mode == "SAME_LOWER"))
        elif mode == "VALID":
            attrs.pop("pads", None)
        y = by_tvm(c, op_type, attrs=attrs)
        return [y, *[None] * (len(c.outputs) - 1)]

    return convert


def max_unpool(c: Call) -> list[Any]:
    """MaxUnpool: put every value where its index, counted through the whole output, says; zero elsewhere.

    With an output shape the indices count through that shape, as MaxPool makes them from its input and as ONNX
    Runtime reads them.
    """
    x, indices = c.need(0), c.need(1)
    dims, kernel = known_sizes(x), [int(k) for k in c.attrs["kernel_shape"]]
    strides = [int(s) for s in c.attrs.get("strides", [1] * len(kernel))]
    pads = [int(p) for p in c.attrs.get("pads", [0] * (2 * len(kernel)))]
    if dims is None or len(dims) != len(kernel) + 2 or not all(isinstance(d, int) for d in dims):
        raise UnsupportedModel(f"{c.where}: shape {dims} with kernel {kernel}", "fix the sizes with input_shapes")
    ends = pads[len(kernel) :]
    shape = dims[:2] + [(d - 1) * s + k - a - b for d, s, k, a, b in zip(dims[2:], strides, kernel, pads, ends)]
    if c.arg(2) is not None:
        known = c.known[2].list() if c.known[2] is not None else []
        if len(known) != len(dims) or not all(isinstance(d, int) and d >= 0 for d in known):
            raise UnsupportedModel(
                f"{c.where}: its output shape is {known or 'known at run time only'}, its input's {dims}",
                "store the output shape as an initializer, one fixed size for each axis",
            )
        shape = known
    count = int(np.prod(dims, dtype="int64"))
    if count > int(np.prod(shape, dtype="int64")):
        raise UnsupportedModel(f"{c.where}: {dims} does not fit into {shape}", "correct the output shape")
    zeros = c.emit(op.zeros([int(np.prod(shape, dtype="int64"))], dtype_of(x)))
    flat = [c.emit(op.reshape(t, [count])) for t in (indices, x)]
    return [c.emit(op.reshape(c.emit(op.scatter_elements(zeros, *flat, axis=0)), shape))]


POOLS: dict[tuple[str, str], Converter] = {
    ("", "MaxPool"): _pool("MaxPool"),
    ("", "AveragePool"): _pool("AveragePool"),
    ("", "LpPool"): _pool("LpPool"),
    ("", "MaxUnpool"): max_unpool,
}
