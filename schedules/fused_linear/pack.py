"""Put weights in the order in which a fused linear kernel reads them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import relax

from .plan import Plan, order
from .spec import Spec


def _by_column(weight: relax.Expr, layout: str) -> relax.Expr:
    return weight if layout == "out_in" else relax.op.permute_dims(weight, [1, 0])


def pack_weights(
    builder: relax.BlockBuilder, spec: Spec, cut: Plan, weights: Sequence[tuple[relax.Expr, str]]
) -> relax.Expr:
    """Return ``(groups, depth, width)`` of linear layers side by side.

    Parameters
    ----------
    builder : relax.BlockBuilder
        Emits operators on the weights alone, which are computed once when the model is built.
    spec, cut : Spec, Plan
    weights : sequence of (relax.Expr, str)
        Each with its layout: ``out_in`` ``(columns, depth)`` or ``in_out`` ``(depth, columns)``.
    """
    columns = order(spec, cut)
    groups, depth, width = cut.groups, spec.depth, cut.width
    across = all(layout == "in_out" for _, layout in weights)
    parts = [weight if across else _by_column(weight, layout) for weight, layout in weights]
    axis = 1 if across else 0
    whole = parts[0] if len(parts) == 1 else builder.emit(relax.op.concat(parts, axis))
    whole = whole if isinstance(whole, relax.Var) else builder.emit(whole)
    if not np.array_equal(columns, np.arange(int(whole.ty.shape[axis]))):
        whole = builder.emit(relax.op.take(whole, relax.const(columns, "int64"), axis=axis, mode="clip"))
    split = [depth, groups, width] if across else [groups, width, depth]
    whole = builder.emit(relax.op.reshape(whole, split))
    return builder.emit(relax.op.permute_dims(whole, [1, 0, 2] if across else [0, 2, 1]))


def pack_bias(
    builder: relax.BlockBuilder, spec: Spec, cut: Plan, biases: Sequence[tuple[relax.Expr | None, int]]
) -> relax.Expr:
    """Return ``(groups, width)`` of the layers' biases, zero where a layer has none.

    Parameters
    ----------
    builder, spec, cut
        As for :func:`pack_weights`.
    biases : sequence of (relax.Expr or None, int)
        Each of as many values as the layer has columns, and that number.
    """
    parts = [
        relax.const(np.zeros(count, spec.dtype), spec.dtype)
        if bias is None
        else builder.emit(relax.op.reshape(bias, [count]))
        for bias, count in biases
    ]
    whole = parts[0] if len(parts) == 1 else builder.emit(relax.op.concat(parts, 0))
    columns = order(spec, cut)
    if not np.array_equal(columns, np.arange(sum(count for _, count in biases))):
        whole = builder.emit(relax.op.take(whole, relax.const(columns, "int64"), axis=0, mode="clip"))
    return builder.emit(relax.op.reshape(whole, [cut.groups, cut.width]))
