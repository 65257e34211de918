"""Attention: grouped heads, masks of several kinds, ragged head sizes, two lengths."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st
from tvm import relax

from .. import references as ref
from .build import DTYPES, Case, Input, build

#: Stands for minus infinity: float16 holds it, and its exponential is 0 in every dtype.
FAR = -1e4

MASKS = ("none", "causal", "bias", "boolean")


def emit_repeated_heads(bb: relax.BlockBuilder, x: relax.Expr, ratio: int) -> relax.Expr:
    """Emit every head ``ratio`` times, as torch's exporter spells it; x is (batch, heads, seq, dim)."""
    if ratio == 1:
        return x
    batch, heads, seq, dim = x.ty.shape
    wide = bb.emit(relax.op.expand_dims(x, 2))
    wide = bb.emit(relax.op.broadcast_to(wide, relax.ShapeExpr([batch, heads, ratio, seq, dim])))
    return bb.emit(relax.op.reshape(wide, relax.ShapeExpr([batch, int(heads) * ratio, seq, dim])))


def emit_attention(
    bb: relax.BlockBuilder,
    q: relax.Expr,
    k: relax.Expr,
    v: relax.Expr,
    mask: str = "none",
    extra: relax.Expr | None = None,
) -> relax.Expr:
    """Emit attention over (batch, heads, seq, dim) as products, a softmax, and a mask of ``MASKS``.

    ``extra`` (seq, keys) is what ``"bias"`` adds, or where ``"boolean"`` lets through; ``"causal"`` wants as many
    queries as keys.
    """
    dtype, dim = str(q.ty.dtype), int(q.ty.shape[-1])
    ratio = int(q.ty.shape[1]) // int(k.ty.shape[1])
    k, v = (emit_repeated_heads(bb, t, ratio) for t in (k, v))
    scores = bb.emit(relax.op.matmul(q, bb.emit(relax.op.permute_dims(k, [0, 1, 3, 2]))))
    scores = bb.emit(relax.op.multiply(scores, relax.const(1.0 / math.sqrt(dim), dtype)))
    if mask == "causal":
        far = bb.emit(relax.op.full([q.ty.shape[2], k.ty.shape[2]], relax.const(FAR, dtype), dtype))
        scores = bb.emit(relax.op.add(scores, bb.emit(relax.op.triu(far, 1))))
    elif mask == "bias":
        scores = bb.emit(relax.op.add(scores, extra))
    elif mask == "boolean":
        scores = bb.emit(relax.op.where(extra, scores, relax.const(FAR, dtype)))
    return bb.emit(relax.op.matmul(bb.emit(relax.op.nn.softmax(scores, -1)), v))


@st.composite
def attention(draw: Any) -> Case:
    """Attention of (batch, heads, n, dim) over keys and values of 1 or more heads and n or m tokens.

    A boolean mask may hide every key from a query: all its scores are then equal.
    """
    dtype, dim, wide = draw(DTYPES), draw(st.sampled_from([1, 3, 5, 8])), draw(st.sampled_from([1, 3, 4]))
    batch, key_heads, ratio = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    mask = draw(st.sampled_from(MASKS))
    keys = "n" if mask == "causal" or draw(st.booleans()) else "m"
    inputs: list[Input] = [
        Input((batch, key_heads * ratio, "n", dim)),
        Input((batch, key_heads, keys, dim)),
        Input((batch, key_heads, keys, wide)),
    ]
    if mask in ("bias", "boolean"):
        inputs.append(Input(("n", keys), "bool" if mask == "boolean" else ""))

    def emit(bb: relax.BlockBuilder, p: list[relax.Expr]) -> list[relax.Expr]:
        return [emit_attention(bb, p[0], p[1], p[2], mask, p[3] if len(p) > 3 else None)]

    def reference(x: list[np.ndarray]) -> list[np.ndarray]:
        q, k, v, *extra = x
        if mask == "boolean":
            return [ref.attention(q, k, v, keep=extra[0], hidden=FAR)]
        return [ref.attention(q, k, v, extra[0] if extra else None, mask == "causal")]

    return build(draw, inputs, emit, reference, dtype)
