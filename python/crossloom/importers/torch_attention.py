"""Translate scaled_dot_product_attention as PyTorch defines it.

``softmax(q k^T * scale + mask) v`` over ``(..., heads, seq, dim)``; ``scale`` defaults to ``1/sqrt(dim)``;
``is_causal`` is aligned top-left whatever the two lengths; a boolean mask keeps where true, and a row that
keeps nothing gives zeros; with ``enable_gqa`` query head ``i`` reads key/value head ``i // (heads /
kv_heads)``.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.relax import op

from ..errors import UnsupportedModel

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def convert_attention(node: Any, importer: Any) -> relax.Var:
    """Translate one node; a ``custom_convert_map`` entry of TVM's PyTorch importer.

    Raises
    ------
    UnsupportedModel
        Dropout, or an input that is not of rank 4.
    """
    given: dict[str, Any] = dict(zip(NAMES, node.args))
    given.update(node.kwargs)
    emit = importer.block_builder.emit
    query, key, value = (importer.env[given[name]] for name in NAMES[:3])
    mask = importer.env[given["attn_mask"]] if given.get("attn_mask") is not None else None
    if given.get("dropout_p", 0.0):
        raise UnsupportedModel(f"{node.name!r}: attention with dropout", "export the module in eval() mode")
    ranks = {len(tensor.ty.shape) for tensor in (query, key, value)}
    if ranks != {4}:
        raise UnsupportedModel(
            f"{node.name!r}: scaled_dot_product_attention on tensors of rank {sorted(ranks)}",
            "reshape to (batch, heads, seq, dim) before attention",
        )
    if given.get("enable_gqa"):
        key, value = (emit(_repeat_heads(tensor, query)) for tensor in (key, value))
    scale = given.get("scale")
    scale = float(scale) if scale is not None else 1.0 / math.sqrt(int(query.ty.shape[-1]))

    boolean = mask is not None and str(mask.ty.dtype) == "bool"
    causal = bool(given.get("is_causal"))
    if not causal and not boolean:
        if mask is not None and len(mask.ty.shape) < 4:
            mask = emit(op.expand_dims(mask, axis=list(range(4 - len(mask.ty.shape)))))
        moved = [emit(op.permute_dims(tensor, [0, 2, 1, 3])) for tensor in (query, key, value)]
        fused = emit(op.nn.attention(*moved, bias=mask, scale=tirx.FloatImm("float32", scale)))
        return emit(op.permute_dims(fused, [0, 2, 1, 3]))

    # A masked score must vanish even beside a huge one, so it is minus infinity; rows with nothing left are
    # zeroed.
    dtype = str(query.ty.dtype)
    scores = emit(op.matmul(query, emit(op.permute_dims(key, [0, 1, 3, 2]))))
    scores = emit(op.multiply(scores, relax.const(scale, dtype)))
    keep = mask if boolean else None
    if mask is not None and not boolean:
        scores = emit(op.add(scores, mask))
    if causal:
        rows, columns = query.ty.shape[2], key.ty.shape[2]
        row = emit(op.expand_dims(emit(_range(rows)), axis=[1]))
        column = emit(op.expand_dims(emit(_range(columns)), axis=[0]))
        triangle = emit(op.less_equal(column, row))
        keep = triangle if keep is None else emit(op.logical_and(keep, triangle))
    scores = emit(op.where(keep, scores, relax.const(float("-inf"), dtype)))
    top = emit(op.max(scores, axis=-1, keepdims=True))
    lowest = float(tvm.tirx.min_value(dtype).value)
    weights = emit(op.exp(emit(op.subtract(scores, emit(op.maximum(top, relax.const(lowest, dtype)))))))
    total = emit(op.sum(weights, axis=[-1], keepdims=True))
    some = emit(op.greater(total, relax.const(0, dtype)))
    weights = emit(op.divide(weights, emit(op.where(some, total, relax.const(1, dtype)))))
    return emit(op.matmul(weights, value))


def _range(size: Any) -> relax.Expr:
    end = size if isinstance(size, int) else relax.prim_value(size)
    return op.arange(0, end, 1, "int64")


def _repeat_heads(tensor: relax.Expr, query: relax.Expr) -> relax.Expr:
    """Repeat key/value heads next to each other: 0, 0, 1, 1."""
    heads, own = int(query.ty.shape[1]), int(tensor.ty.shape[1])
    return tensor if heads == own else op.repeat(tensor, heads // own, axis=1)
