"""What the tests of semantic gates share: cosines in every spelling, and a reference."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from tvm import relax

from crossloom.testing.strategies import build

op = relax.op
EPS = 1e-8


def number(e, value, like):
    return relax.const(value, str(like.ty.dtype))


def norm(e, x, spelling="product", keep=True):
    """Return the length of rows."""
    if spelling == "torch":
        squares = e(op.power(e(op.abs(x)), number(e, 2.0, x)))
        return e(op.power(e(op.sum(squares, [-1], keep)), number(e, 0.5, x)))
    squares = e(op.square(x)) if spelling == "square" else e(op.multiply(x, x))
    return e(op.sqrt(e(op.sum(squares, [-1], keep))))


def by_product(e, a, b, keep=True, eps=EPS):
    """max(|a| |b|, eps)."""
    lengths = e(op.multiply(norm(e, a, keep=keep), norm(e, b, "square", keep)))
    return e(op.divide(e(op.sum(e(op.multiply(a, b)), [-1], keep)), e(op.maximum(lengths, number(e, eps, a)))))


def by_torch(e, a, b, keep=True, eps=EPS):
    """F.cosine_similarity as it is exported: each length at least eps, and divided first."""

    def unit(x):
        length = norm(e, x, "torch")
        least = e(op.broadcast_to(number(e, eps, x), length.ty.shape))
        return e(op.divide(x, e(op.clip(e(op.maximum(length, least)), -np.inf, np.inf))))

    return e(op.sum(e(op.multiply(unit(a), unit(b))), [-1], keep))


def by_normalize(e, a, b, keep=True, eps=EPS):
    """F.normalize, its length spread over the row, and a product."""

    def unit(x):
        return e(op.divide(x, e(op.broadcast_to(e(op.clip(norm(e, x, "torch"), eps, np.inf)), x.ty.shape))))

    return e(op.sum(e(op.multiply(unit(a), unit(b))), [-1], keep))


def by_rsqrt(e, a, b, keep=True, eps=EPS):
    """Products with inverse lengths, bounded as squares."""

    def inverse(x):
        return e(op.rsqrt(e(op.maximum(e(op.sum(e(op.multiply(x, x)), [-1], keep)), number(e, eps * eps, x)))))

    dot = e(op.sum(e(op.multiply(a, b)), [-1], keep))
    return e(op.multiply(e(op.multiply(dot, inverse(a))), inverse(b)))


def by_matmul(e, a, b, keep=True, eps=EPS):
    """Rows times columns, one by one."""

    def unit(x):
        return e(op.divide(x, e(op.maximum(norm(e, x), number(e, eps, x)))))

    both = e(op.matmul(e(op.expand_dims(unit(a), [-2])), e(op.expand_dims(unit(b), [-1]))))
    out = e(op.squeeze(both, [-1]))
    return out if keep else e(op.squeeze(out, [-1]))


SPELLINGS = (by_product, by_torch, by_normalize, by_rsqrt, by_matmul)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def cosine(a, b, spelling=by_torch, eps=EPS):
    """Return the cosine of rows in float64, ``(..., 1)``, where lengths are bounded as the spelling does."""
    a, b = a.astype("float64"), b.astype("float64")
    lengths = [np.sqrt((x * x).sum(-1, keepdims=True)) for x in (a, b)]
    dot = (a * b).sum(-1, keepdims=True)
    if spelling is by_product:
        return dot / np.maximum(lengths[0] * lengths[1], eps)
    return dot / (np.maximum(lengths[0], eps) * np.maximum(lengths[1], eps))


@st.composite
def gates(draw, change=lambda mod: mod):
    """Draw a gate: its spelling, its numbers, what is made of it, and vectors for all rows or each."""
    d, dtype = draw(st.sampled_from([2, 5, 8, 19, 64])), draw(st.sampled_from(["float32", "float16"]))
    spelling, form = draw(st.sampled_from(SPELLINGS)), draw(st.sampled_from(["a", "ab", "mix"]))
    scale, shift = draw(st.sampled_from([(1.0, 0.0), (5.0, -0.5)]))
    # Below float16's least number a bound is none.
    eps = 1e-8 if dtype == "float32" else 1e-2

    def emit(bb, p):
        e, (a, b) = bb.emit, p
        keep = draw_keep
        g = spelling(e, a, b, keep, eps)
        if scale != 1.0:
            g = e(op.add(e(op.multiply(g, number(e, scale, a))), number(e, shift, a)))
        g = e(op.sigmoid(g))
        g = g if keep else e(op.expand_dims(g, [-1]))
        if form == "a":
            return [e(op.multiply(a, g))]
        if form == "ab":
            return [e(op.add(a, e(op.multiply(g, b))))]
        rest = e(op.subtract(number(e, 1.0, a), g))
        return [e(op.add(e(op.multiply(g, a)), e(op.multiply(rest, b))))]

    def reference(x):
        a, b = (t.astype("float64") for t in x)
        g = sigmoid(cosine(a, b, spelling, eps) * scale + shift)
        return [{"a": a * g, "ab": a + g * b, "mix": g * a + (1 - g) * b}[form]]

    draw_keep = draw(st.booleans())
    case = build(draw, [("n", d), ("n", d)], emit, reference, dtype)
    return type(case)(change(case.mod), case.sizes, dtype, case.references)
