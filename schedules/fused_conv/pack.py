"""Put weights in the order in which a fused convolution kernel reads them."""

from __future__ import annotations

import math

import numpy as np
from tvm import relax

from .geometry import Geometry
from .plan import Plan
from .spec import Spec


def _constant(expr: relax.Expr) -> np.ndarray | None:
    value = getattr(expr, "value", None)
    return value.numpy() if value is not None and hasattr(value, "numpy") else None


def pack_weights(builder: relax.BlockBuilder, spec: Spec, cut: Plan, weight: relax.Expr) -> relax.Expr:
    """Return ``(groups, blocks, taps, channels of a group, block)`` of ``(outputs, channels of a group, *kernel)``.

    Parameters
    ----------
    builder : relax.BlockBuilder
        Emits operators on the weight alone, which are computed once when the model is built; those of a constant are
        computed here.
    spec, cut : Spec, Plan
    weight : relax.Expr

    Notes
    -----
    They are of the type that sums are kept in: a weight that every piece of work widens anew costs more than its
    product.
    """
    op, emit = relax.op, builder.emit
    outputs, inner, taps = spec.outputs // spec.groups, spec.channels // spec.groups, math.prod(spec.kernel)
    order = Geometry.of(spec).order(spec.kernel)
    missing = cut.blocks * cut.block - outputs
    blocks, axes = (spec.groups, cut.blocks, cut.block, inner, taps), (0, 1, 4, 3, 2)
    if (array := _constant(weight)) is not None:
        array = array.astype(spec.sum_dtype).reshape(spec.groups, outputs, inner, taps)[..., order]
        array = np.pad(array, [(0, 0), (0, missing), (0, 0), (0, 0)]).reshape(blocks)
        return relax.const(np.ascontiguousarray(array.transpose(axes)), spec.sum_dtype)
    whole = weight if spec.dtype == spec.sum_dtype else emit(op.astype(weight, spec.sum_dtype))
    in_order = order == list(range(taps))
    if missing or not in_order:
        whole = emit(op.reshape(whole, [spec.groups, outputs, inner, taps]))
    if not in_order:
        whole = emit(op.take(whole, relax.const(np.array(order), "int64"), axis=3, mode="clip"))
    if missing:
        whole = emit(op.nn.pad(whole, [0, 0, 0, missing, 0, 0, 0, 0]))
    return emit(op.permute_dims(emit(op.reshape(whole, blocks)), axes))


def pack_channels(builder: relax.BlockBuilder, spec: Spec, operand: relax.Expr) -> relax.Expr:
    """Return a value per output channel, behind and in front of axes of size 1, as ``(outputs,)``."""
    if (array := _constant(operand)) is not None:
        return relax.const(array.reshape(spec.outputs), spec.dtype)
    return builder.emit(relax.op.reshape(operand, [spec.outputs]))
