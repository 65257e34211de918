"""Resize and Upsample of operator sets 7 to 21, brought to sizes of the spatial axes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend as frontend

from crossloom.errors import UnsupportedModel
from crossloom.importers.gather import known_sizes
from crossloom.importers.onnx_contrib import Call, Converter

op = relax.op


def _bad(c: Call, what: str, remedy: str) -> UnsupportedModel:
    return UnsupportedModel(f"{c.where}: {what}", remedy)


def _constant(c: Call, index: int) -> np.ndarray | None:
    """Return a constant operand; None where it is absent or empty."""
    if c.arg(index) is None:
        return None
    array = c.arrays[index] if index < len(c.arrays) else None
    if array is None:
        raise _bad(c, f"operand {index} is not constant", "give constant scales, or sizes made from shapes")
    return array if array.size else None


def _text(c: Call, name: str, default: str) -> str:
    value = c.attrs.get(name, default)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _scaled(c: Call, size: Any, scale: float, exact: bool) -> Any:
    """Return ``floor(scale * size)``; refuse what would make the true scale another than the one given."""
    if not math.isfinite(scale) or scale <= 0:
        raise _bad(c, f"scale {scale}", "give positive scales")
    if isinstance(size, int):
        out = int(np.floor(np.float32(scale) * np.float32(size)))
        if exact and out != np.float32(scale) * np.float32(size):
            raise _bad(c, f"scale {scale:g} makes {scale * size:g} of size {size}", "resize to sizes instead")
        return out
    if scale == int(scale):
        return size * int(scale)
    if not exact and 1 / scale == int(1 / scale):
        return size // int(1 / scale)
    raise _bad(c, f"scale {scale:g} of the symbolic size {size}", "fix the size with input_shapes")


def _emit(c: Call, x: Any, sizes: list[Any], how: str, nearest: str) -> list[Any]:
    """Resize the axes after the first two to `sizes`."""
    rank, mode = x.ty.ndim, _text(c, "mode", "nearest")
    attrs = {**c.attrs, "mode": mode.encode(), "nearest_mode": nearest.encode()}
    attrs["coordinate_transformation_mode"] = how.encode()
    if rank == 4:
        method = "nearest_neighbor" if mode == "nearest" else mode
        resized = op.image.resize2d(
            x,
            size=relax.ShapeExpr(sizes),
            roi=[0.0] * 4,
            layout="NCHW",
            method=method,
            coordinate_transformation_mode=how,
            rounding_method=nearest,
            cubic_alpha=float(c.attrs.get("cubic_coeff_a", -0.75)),
            cubic_exclude=int(c.attrs.get("exclude_outside", 0)),
            extrapolation_value=float(c.attrs.get("extrapolation_value", 0.0)),
        )
        return [c.emit(resized)]
    if rank not in (3, 5) or not all(isinstance(size, int) for size in sizes):
        raise _bad(c, f"rank {rank} to sizes {sizes}", "resize tensors of rank 3 to 5, symbolic sizes at rank 4 only")
    whole = relax.const(np.array([1, 1, *sizes], "int64"), "int64")
    return [c.emit(frontend.Resize._impl_v18(c.bb, [x, None, None, whole], attrs, [{}, {}]))]


def resize(c: Call) -> list[Any]:
    """Convert Resize: ``(x, scales)`` in opset 10, ``(x, roi, scales, sizes)`` since, `axes` since 18."""
    x = c.need(0)
    dims = known_sizes(x)
    if dims is None or len(dims) < 3:
        raise _bad(c, f"a tensor of shape {dims}", "resize tensors of rank 3 to 5")
    old = c.opset < 11
    how = _text(c, "coordinate_transformation_mode", "asymmetric" if old else "half_pixel")
    nearest = _text(c, "nearest_mode", "floor" if old else "round_prefer_floor")
    c.refuse(antialias=0)
    if how == "tf_crop_and_resize" or _text(c, "keep_aspect_ratio_policy", "stretch") != "stretch":
        raise _bad(c, "crops or keeps the aspect ratio", "crop with Slice and resize to fixed sizes")
    axes = [int(a) % len(dims) for a in c.attrs.get("axes", range(len(dims)))]
    scales = _constant(c, 1 if old else 2)
    # The scale itself does not enter where the corners are aligned.
    exact = how != "align_corners"
    target = list(dims)
    if scales is not None:
        if scales.size != len(axes):
            raise _bad(c, f"{scales.size} scales for {len(axes)} axes", "give one for each axis")
        for axis, scale in zip(axes, scales.reshape(-1)):
            target[axis] = dims[axis] if scale == 1 else _scaled(c, dims[axis], float(scale), exact)
    else:
        known = c.known[3] if len(c.known) > 3 else None
        if known is None or len(known.list()) != len(axes):
            raise _bad(c, "neither constant scales nor sizes known from shapes", "give one of them for each axis")
        for axis, size in zip(axes, known.list()):
            target[axis] = size
    for axis in (0, 1):
        same = target[axis] is dims[axis] or (isinstance(target[axis], int) and target[axis] == dims[axis])
        if not same and str(target[axis]) != str(dims[axis]):
            raise _bad(c, f"resizes axis {axis} from {dims[axis]} to {target[axis]}", "resize axes from 2 on")
    if any(isinstance(size, int) and size <= 0 for size in target[2:]):
        raise _bad(c, f"resizes to {target}", "give positive sizes")
    return _emit(c, x, target[2:], how, nearest)


def upsample(c: Call) -> list[Any]:
    """Convert Upsample: scales an attribute before opset 9, then an operand."""
    x = c.need(0)
    dims = known_sizes(x)
    given = c.attrs.get("scales")
    scales = np.array(given, "float32") if given is not None else _constant(c, 1)
    if dims is None or scales is None or scales.size != len(dims) or len(dims) < 3 or any(scales[:2] != 1):
        raise _bad(c, f"scales {scales} on shape {dims}", "give constant scales, 1 on the first two axes")
    sizes = [dim if scale == 1 else _scaled(c, dim, float(scale), True) for dim, scale in zip(dims[2:], scales[2:])]
    return _emit(c, x, sizes, "asymmetric", "floor")


RESIZES: dict[tuple[str, str], Converter] = {("", "Resize"): resize, ("", "Upsample"): upsample}
