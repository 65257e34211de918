"""Whole layers, in which the patterns above meet and share values."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from tvm import relax

from .. import references as ref
from .build import DTYPES, Case, build
from .mixing import emit_attention
from .norms import emit_rms_norm
from .positions import emit_rotary
from .projections import emit_gated_mlp

EPS = 1e-2


def _heads(bb: relax.BlockBuilder, x: relax.Expr, weight: relax.Expr, heads: int, dim: int) -> relax.Expr:
    """Emit a projection of x (1, n, width) and its split into (1, heads, n, dim)."""
    flat = bb.emit(relax.op.matmul(x, weight))
    split = bb.emit(relax.op.reshape(flat, relax.ShapeExpr([1, x.ty.shape[1], heads, dim])))
    return bb.emit(relax.op.permute_dims(split, [0, 2, 1, 3]))


@st.composite
def decoder_layer(draw: Any) -> Case:
    """A decoder layer: RMSNorm, causal attention with grouped heads and rotary embedding, RMSNorm, SwiGLU.

    Both residuals are shared: each sum is normalized and also added to.  The keys, as a cache would keep them, are
    an output too.
    """
    dtype = draw(DTYPES)
    key_heads, ratio, half = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    width, hidden, rest = draw(st.sampled_from([3, 5, 8])), draw(st.sampled_from([1, 5, 8])), draw(st.integers(0, 1))
    heads, dim = key_heads * ratio, 2 * half + rest
    convention = draw(st.sampled_from(["half-split", "interleaved"]))
    weights = [
        *[(width,), (width, heads * dim), (width, key_heads * dim), (width, key_heads * dim), (heads * dim, width)],
        *[(width,), (width, hidden), (width, hidden), (hidden, width)],
    ]

    def emit(bb: relax.BlockBuilder, p: list[relax.Expr]) -> list[relax.Expr]:
        x, angles, first, wq, wk, wv, wo, second, gate, up, down = p
        normed = emit_rms_norm(bb, x, first, EPS)
        q = emit_rotary(bb, _heads(bb, normed, wq, heads, dim), angles, half, convention)
        k = emit_rotary(bb, _heads(bb, normed, wk, key_heads, dim), angles, half, convention)
        mixed = emit_attention(bb, q, k, _heads(bb, normed, wv, key_heads, dim), "causal")
        flat = bb.emit(relax.op.permute_dims(mixed, [0, 2, 1, 3]))
        flat = bb.emit(relax.op.reshape(flat, relax.ShapeExpr([1, x.ty.shape[1], heads * dim])))
        x = bb.emit(relax.op.add(x, bb.emit(relax.op.matmul(flat, wo))))
        _, change = emit_gated_mlp(bb, emit_rms_norm(bb, x, second, EPS), gate, up, down)
        return [bb.emit(relax.op.add(x, change)), k]

    def reference(given: list[np.ndarray]) -> list[np.ndarray]:
        x, angles, first, wq, wk, wv, wo, second, gate, up, down = (t.astype("float64") for t in given)
        normed = ref.rms_norm(x, first, EPS)
        q, k, v = (
            (normed @ w).reshape(1, x.shape[1], count, dim).swapaxes(1, 2)
            for w, count in ((wq, heads), (wk, key_heads), (wv, key_heads))
        )
        q, k = ref.rotary(q, angles, convention), ref.rotary(k, angles, convention)
        x = x + ref.attention(q, k, v, causal=True).swapaxes(1, 2).reshape(1, x.shape[1], heads * dim) @ wo
        return [x + ref.gated_mlp(ref.rms_norm(x, second, EPS), gate, up, down), k]

    return build(draw, [(1, "n", width), ("n", half), *weights], emit, reference, dtype)
