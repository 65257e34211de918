"""What the tests of residual norms share: norms as importers write them, and a strategy of sums with norms."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from tvm import relax

from crossloom.testing.strategies import build

op = relax.op
EPS = 1e-2


def rms(emit, x, weight=None, eps=EPS, wide=False):
    """Emit RMSNorm; half precision goes by way of float32, as in Llama's own code, and stays that where ``wide``."""
    dtype = str(x.ty.dtype)
    value = x if dtype != "float16" else emit(op.astype(x, "float32"))
    square = emit(op.mean(emit(op.multiply(value, value)), -1, keepdims=True))
    root = emit(op.rsqrt(emit(op.add(square, relax.const(eps, str(value.ty.dtype))))))
    normed = emit(op.multiply(value, root))
    normed = normed if wide or value is x else emit(op.astype(normed, dtype))
    return normed if weight is None else emit(op.multiply(normed, weight))


def layer(emit, x, weight=None, bias=None, eps=EPS):
    """Emit layer normalization; ones and zeros stand for what is not there."""
    depth, dtype = int(x.ty.shape[-1]), str(x.ty.dtype)
    weight = relax.const(np.ones(depth), dtype) if weight is None else weight
    bias = relax.const(np.zeros(depth), dtype) if bias is None else bias
    return emit(op.nn.layer_norm(x, weight, bias, axes=[-1], epsilon=eps))


def reference(x, kind, weight=None, bias=None, eps=EPS):
    """Return a norm of float64 values."""
    centred = x - x.mean(-1, keepdims=True) if kind == "layer" else x
    y = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@st.composite
def residual_norms(draw):
    """Draw a sum, stretched or not, one or two norms of it, and whether it is read again."""
    depth, dtype = draw(st.sampled_from([2, 3, 7, 8, 16, 17, 33, 40])), draw(st.sampled_from(["float32", "float16"]))
    whole = draw(st.sampled_from([("n", depth), ("m", "n", depth), (1, "n", depth), (depth,)]))
    other = draw(st.sampled_from([whole, whole, whole, (depth,), (1,) * len(whole), (*whole[:-1], 1)]))
    norms = draw(st.lists(st.tuples(st.sampled_from(["rms", "layer"]), st.booleans()), min_size=1, max_size=2))
    kept, swapped = draw(st.booleans()), draw(st.booleans())

    def emit(bb, p):
        x, r, weight, bias = p
        s = bb.emit(op.add(r, x) if swapped else op.add(x, r))
        out = []
        for kind, weighted in norms:
            operands = [weight, *([bias] if kind == "layer" else [])] if weighted else []
            out.append((rms if kind == "rms" else layer)(bb.emit, s, *operands))
        return [*out, bb.emit(op.exp(s))] if kept else out

    def expected(values):
        x, r, weight, bias = (v.astype("float64") for v in values)
        s = (x + r).astype(dtype).astype("float64")
        out = [
            reference(s, kind, *([weight, bias if kind == "layer" else None] if weighted else []))
            for kind, weighted in norms
        ]
        return [*out, np.exp(s)] if kept else out

    inputs = [whole, other, (depth,), (depth,)]
    return build(draw, inputs, emit, expected, dtype)
