"""Normalizations, with and without the residual they follow."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from tvm import relax

from .. import references as ref
from .build import DIMS, DTYPES, Case, build


def emit_rms_norm(bb: relax.BlockBuilder, x: relax.Expr, weight: relax.Expr, eps: float) -> relax.Expr:
    """Emit RMSNorm as importers spell it."""
    square = bb.emit(relax.op.multiply(x, x))
    mean = bb.emit(relax.op.mean(square, -1, keepdims=True))
    inverse = bb.emit(relax.op.rsqrt(bb.emit(relax.op.add(mean, relax.const(eps, str(x.ty.dtype))))))
    return bb.emit(relax.op.multiply(bb.emit(relax.op.multiply(x, inverse)), weight))


@st.composite
def rms_norm(draw: Any) -> Case:
    """RMSNorm over the last axis of (n, d)."""
    d, dtype = draw(DIMS), draw(DTYPES)

    def emit(bb: relax.BlockBuilder, p: list[relax.Expr]) -> list[relax.Expr]:
        return [emit_rms_norm(bb, p[0], p[1], 1e-3)]

    return build(draw, [("n", d), (d,)], emit, lambda x: [ref.rms_norm(x[0], x[1], 1e-3)], dtype)


@st.composite
def layer_norm(draw: Any) -> Case:
    """Layer normalization over the last axis of (n, d): one operator, or spelled out; with or without a bias."""
    # Of a single feature nothing is left but its rounding errors, divided by the root of epsilon.
    d, dtype = draw(DIMS.filter(lambda d: d > 1)), draw(DTYPES)
    spelled, biased = draw(st.booleans()), draw(st.booleans())

    def emit(bb: relax.BlockBuilder, p: list[relax.Expr]) -> list[relax.Expr]:
        x, weight = p[0], p[1]
        bias = p[2] if biased else relax.const(np.zeros(d), dtype)
        if not spelled:
            return [relax.op.nn.layer_norm(x, weight, bias, axes=[-1], epsilon=1e-2)]
        centred = bb.emit(relax.op.subtract(x, bb.emit(relax.op.mean(x, -1, keepdims=True))))
        spread = bb.emit(relax.op.mean(bb.emit(relax.op.multiply(centred, centred)), -1, keepdims=True))
        root = bb.emit(relax.op.sqrt(bb.emit(relax.op.add(spread, relax.const(1e-2, dtype)))))
        scaled = bb.emit(relax.op.multiply(bb.emit(relax.op.divide(centred, root)), weight))
        return [relax.op.add(scaled, bias)] if biased else [scaled]

    def reference(x: list[np.ndarray]) -> list[np.ndarray]:
        return [ref.layer_norm(x[0], x[1], x[2] if biased else np.zeros(d), 1e-2)]

    return build(draw, [("n", d), (d,), *([(d,)] if biased else [])], emit, reference, dtype)


@st.composite
def residual_norm(draw: Any) -> Case:
    """``x + y`` and its layer normalization, the sum being an output too (shared residual)."""
    d, dtype = draw(DIMS), draw(DTYPES)

    def emit(bb: relax.BlockBuilder, p: list[relax.Expr]) -> list[relax.Expr]:
        total = bb.emit(relax.op.add(p[0], p[1]))
        return [relax.op.nn.layer_norm(total, p[2], p[3], axes=[-1], epsilon=1e-2), total]

    def reference(x: list[np.ndarray]) -> list[np.ndarray]:
        total = x[0].astype("float64") + x[1].astype("float64")
        return [ref.layer_norm(total, x[2], x[3], 1e-2), total]

    return build(draw, [("n", d), ("n", d), (d,), (d,)], emit, reference, dtype)
