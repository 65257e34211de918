"""Rotary embeddings in every convention that models use."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from tvm import relax

from .. import references as ref
from .build import DTYPES, Case, build

#: How features are paired and where their angles come from.
CONVENTIONS = ("half-split", "interleaved", "2-d", "m-rope")


def _part(bb: relax.BlockBuilder, x: relax.Expr, first: int, last: int, step: int = 1) -> relax.Expr:
    """Emit ``x[..., first:last:step]``."""
    axis = len(x.ty.shape) - 1
    return bb.emit(relax.op.strided_slice(x, [axis], [first], [last], [step]))


def _joined(bb: relax.BlockBuilder, parts: list[relax.Expr]) -> relax.Expr:
    return parts[0] if len(parts) == 1 else bb.emit(relax.op.concat(parts, axis=-1))


def emit_rotary(
    bb: relax.BlockBuilder, x: relax.Expr, angles: relax.Expr, half: int, convention: str = "half-split"
) -> relax.Expr:
    """Emit the rotation of the first ``2 * half`` features of x (..., n, dim) by angles (n, half).

    ``convention`` is ``"half-split"`` or ``"interleaved"``; later features pass.
    """
    dim = int(x.ty.shape[-1])
    turned = _part(bb, x, 0, 2 * half)
    cos, sin = bb.emit(relax.op.cos(angles)), bb.emit(relax.op.sin(angles))
    if convention == "half-split":
        cos, sin = (_joined(bb, [t, t]) for t in (cos, sin))
        crossed = _joined(bb, [bb.emit(relax.op.negative(_part(bb, x, half, 2 * half))), _part(bb, x, 0, half)])
    else:
        cos, sin = (bb.emit(relax.op.repeat(t, 2, axis=1)) for t in (cos, sin))
        even, odd = _part(bb, turned, 0, 2 * half, 2), _part(bb, turned, 1, 2 * half, 2)
        axis = len(x.ty.shape)
        pairs = [bb.emit(relax.op.expand_dims(t, axis)) for t in (bb.emit(relax.op.negative(odd)), even)]
        stacked = bb.emit(relax.op.concat(pairs, axis=axis))
        crossed = bb.emit(relax.op.reshape(stacked, relax.ShapeExpr([*list(x.ty.shape)[:-1], 2 * half])))
    left, right = bb.emit(relax.op.multiply(turned, cos)), bb.emit(relax.op.multiply(crossed, sin))
    out = bb.emit(relax.op.add(left, right))
    return out if dim == 2 * half else _joined(bb, [out, _part(bb, x, 2 * half, dim)])


@st.composite
def rotary(draw: Any, convention: str = "half-split") -> Case:
    """Rotary embedding of (n, d), whole or partial.

    ``convention``: ``"half-split"`` and ``"interleaved"`` take angles (n, rotated / 2); ``"2-d"`` turns one block
    of features by row angles and the next by column angles, each half-split (vision towers); ``"m-rope"``
    takes the angles of each section of features from time, row or column (multimodal decoders).
    """
    if convention not in CONVENTIONS:
        raise ValueError(f"unknown rotary convention {convention!r}: {', '.join(CONVENTIONS)}")
    dtype, rest = draw(DTYPES), draw(st.sampled_from([0, 1, 4]))
    if convention == "2-d":
        return _two_dimensional(draw, draw(st.sampled_from([1, 2, 3])), rest, dtype)
    if convention == "m-rope":
        return _by_sections(draw, [draw(st.integers(1, 2)) for _ in range(3)], rest, dtype)
    half = draw(st.sampled_from([1, 2, 3]))

    def emit(bb: relax.BlockBuilder, p: list[relax.Expr]) -> list[relax.Expr]:
        return [emit_rotary(bb, p[0], p[1], half, convention)]

    def reference(x: list[np.ndarray]) -> list[np.ndarray]:
        return [ref.rotary(x[0], x[1], convention)]

    return build(draw, [("n", 2 * half + rest), ("n", half)], emit, reference, dtype)


def _two_dimensional(draw: Any, half: int, rest: int, dtype: str) -> Case:
    block = 2 * half

    def emit(bb: relax.BlockBuilder, p: list[relax.Expr]) -> list[relax.Expr]:
        blocks = [emit_rotary(bb, _part(bb, p[0], i * block, (i + 1) * block), p[1 + i], half) for i in range(2)]
        return [_joined(bb, [*blocks, *([_part(bb, p[0], 2 * block, 2 * block + rest)] if rest else [])])]

    def reference(x: list[np.ndarray]) -> list[np.ndarray]:
        blocks = [ref.rotary(x[0][:, i * block : (i + 1) * block], x[1 + i]) for i in range(2)]
        return [np.concatenate([*blocks, x[0][:, 2 * block :].astype("float64")], axis=-1)]

    return build(draw, [("n", 2 * block + rest), ("n", half), ("n", half)], emit, reference, dtype)


def _by_sections(draw: Any, sections: list[int], rest: int, dtype: str) -> Case:
    half = sum(sections)
    starts = [sum(sections[:i]) for i in range(3)]

    def emit(bb: relax.BlockBuilder, p: list[relax.Expr]) -> list[relax.Expr]:
        chosen = [_part(bb, p[1 + i], start, start + size) for i, (start, size) in enumerate(zip(starts, sections))]
        return [emit_rotary(bb, p[0], _joined(bb, chosen), half)]

    def reference(x: list[np.ndarray]) -> list[np.ndarray]:
        stream = np.repeat(np.arange(3), sections)
        return [ref.rotary(x[0], np.stack(x[1:])[stream, :, np.arange(half)].T)]

    return build(draw, [("n", 2 * half + rest), *[("n", half)] * 3], emit, reference, dtype)
