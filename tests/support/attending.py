"""What the tests of fused attention share: attention as models spell it, and cases to draw."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st
from tvm import relax

from crossloom.testing import references, strategies

op = relax.op


def const(value, dtype="float32"):
    return relax.const(value, dtype)


def attend(e, q, k, v, mask=lambda e, s: s, scale=0.5):
    """Emit attention over (batch, heads, seq, dim)."""
    turned = e(op.permute_dims(k, [0, 1, 3, 2]))
    s = e(op.multiply(e(op.matmul(q, turned)), const(scale, str(q.ty.dtype))))
    return op.matmul(e(op.nn.softmax(mask(e, s), -1)), v)


def apart(e, x, heads, dim):
    """Emit (batch, heads, seq, dim) from (batch, seq, heads * dim)."""
    batch, seq = list(x.ty.shape)[:2]
    return e(op.permute_dims(e(op.reshape(x, [batch, seq, heads, dim])), [0, 2, 1, 3]))


def together(e, x):
    """Emit (batch, seq, heads * dim) from (batch, heads, seq, dim)."""
    x = e(x)
    batch, heads, seq, dim = x.ty.shape
    return op.reshape(e(op.permute_dims(x, [0, 2, 1, 3])), [batch, seq, int(heads) * int(dim)])


def repeated(e, x, groups):
    return e(op.repeat(x, groups, 1)) if groups > 1 else x


def keys_up_to(e, s, offset=0):
    """Emit which keys a causal mask keeps."""
    rows, columns = list(s.ty.shape)[2:]
    row = e(op.expand_dims(e(op.arange(offset, offset + rows, 1, "int64")), 1))
    return e(op.less_equal(e(op.expand_dims(e(op.arange(0, columns, 1, "int64")), 0)), row))


def causal(e, s, fill=-math.inf, offset=0):
    return e(op.where(keys_up_to(e, s, offset), s, const(fill, str(s.ty.dtype))))


@st.composite
def cached(draw):
    """A decoder's attention: projections' views, a cache that grows, shared heads, a mask of several kinds."""
    groups, dim, heads = draw(st.sampled_from([1, 3])), draw(st.sampled_from([3, 8])), 2
    mask, returned = draw(st.sampled_from(["none", "add", "bias and causal"])), draw(st.booleans())
    past = draw(st.booleans())
    dtype = draw(st.sampled_from(["float32", "float16"]))
    inputs = [strategies.Input((2, "n", heads * groups * dim)), *[strategies.Input((2, "n", heads * dim))] * 2]
    inputs += [strategies.Input((2, heads, "m", dim))] * 2 if past else []
    inputs += [strategies.Input((2, 1, 1, 1))] if mask == "add" else []
    inputs += [strategies.Input((heads * groups, 1, 1))] if mask == "bias and causal" else []

    def emit(bb, p):
        e = bb.emit
        q, k, v = apart(e, p[0], heads * groups, dim), apart(e, p[1], heads, dim), apart(e, p[2], heads, dim)
        if past:
            k, v = e(op.concat([p[3], k], 2)), e(op.concat([p[4], v], 2))

        def masked(e, s):
            if mask == "none":
                return s
            s = e(op.add(s, p[-1]))
            return causal(e, s, -1e4) if mask != "add" and not past else s

        out = together(e, attend(e, q, repeated(e, k, groups), repeated(e, v, groups), masked))
        return [out, k, v] if returned else [out]

    def reference(x):
        def split(t, heads):
            return t.reshape(*t.shape[:2], heads, dim).transpose(0, 2, 1, 3)

        q, k, v = split(x[0], heads * groups), split(x[1], heads), split(x[2], heads)
        if past:
            k, v = np.concatenate([x[3], k], 2), np.concatenate([x[4], v], 2)
        extra = None if mask == "none" else x[-1]
        hide = mask == "bias and causal" and not past
        out = references.attention(q, k, v, extra, hide, 0.5).transpose(0, 2, 1, 3)
        out = out.reshape(*out.shape[:2], -1)
        return [out, k, v] if returned else [out]

    return strategies.build(draw, inputs, emit, reference, dtype)
