"""Put weights in the order in which a fused convolution kernel reads them."""

from __future__ import annotations

import numpy as np
from tvm import relax

from .geometry import Geometry
from .plan import Plan
from .spec import Spec


def pack_weights(builder: relax.BlockBuilder, spec: Spec, cut: Plan, weight: relax.Expr) -> relax.Expr:
    """Return ``(groups, blocks, taps, channels of a group, block)`` of ``(outputs, channels of a group, *kernel)``.

    Parameters
    ----------
    builder : relax.BlockBuilder
        Emits operators on the weight alone, which are computed once when the model is built.
    spec, cut : Spec, Plan
    weight : relax.Expr

    Notes
    -----
    They are of the type that sums are kept in: a weight that every piece of work widens anew costs more than its
    product.
    """
    op, emit = relax.op, builder.emit
    outputs, inner, taps = spec.outputs // spec.groups, spec.channels // spec.groups, int(np.prod(spec.kernel))
    whole = weight if spec.dtype == spec.sum_dtype else emit(op.astype(weight, spec.sum_dtype))
    order = Geometry.of(spec).order(spec.kernel)
    missing = cut.blocks * cut.block - outputs
    if order != list(range(taps)) or missing:
        whole = emit(op.reshape(whole, [spec.groups, outputs, inner, taps]))
    if order != list(range(taps)):
        whole = emit(op.take(whole, relax.const(np.array(order), "int64"), axis=3, mode="clip"))
    if missing:
        whole = emit(op.nn.pad(whole, [0, 0, 0, missing, 0, 0, 0, 0]))
    whole = emit(op.reshape(whole, [spec.groups, cut.blocks, cut.block, inner, taps]))
    return emit(op.permute_dims(whole, [0, 1, 4, 3, 2]))
