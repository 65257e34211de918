"""What the tests of fused convolutions share: the convolution in numpy, tap by tap, and modules of them to draw."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import strategies as st
from tvm import relax

from crossloom.testing.strategies import build

op = relax.op

ACTIVATIONS = {
    "relu": lambda y: np.maximum(y, 0),
    "silu": lambda y: y / (1 + np.exp(-y)),
    "sigmoid": lambda y: 1 / (1 + np.exp(-y)),
    "tanh": np.tanh,
    "gelu": lambda y: y * (1 + np.vectorize(math.erf, otypes=["float64"])(y / math.sqrt(2))) / 2,
    "clip": np.clip,
    "leaky_relu": lambda y, alpha: np.where(y < 0, y * alpha, y),
}


def convolve(x, weight, strides, before, after, dilation, groups):
    """Return a convolution in float64: the sum over taps of shifted inputs times that tap's weights."""
    batch, _, *size = x.shape
    outputs, inner, *kernel = weight.shape
    padded = np.pad(x.astype("float64"), [(0, 0), (0, 0), *zip(before, after)])
    result = [
        (n + b + a - d * (k - 1) - 1) // s + 1
        for n, b, a, d, k, s in zip(size, before, after, dilation, kernel, strides)
    ]
    out = np.zeros((batch, outputs, *result))
    by_group = weight.astype("float64").reshape(groups, outputs // groups, inner, *kernel)
    for tap in itertools.product(*map(range, kernel)):
        places = tuple(slice(t * d, t * d + (n - 1) * s + 1, s) for t, d, n, s in zip(tap, dilation, result, strides))
        part = padded[(slice(None), slice(None), *places)].reshape(batch, groups, inner, math.prod(result))
        out += np.einsum("goi,ngip->ngop", by_group[(..., *tap)], part, optimize=True).reshape(out.shape)
    return out


@st.composite
def convolutions(draw, dtypes=("float32", "float16")):
    """Draw a convolution and up to three steps behind it; batch and the last axis may be symbolic."""
    rank = draw(st.sampled_from([1, 2, 2, 3]))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    channels, outputs = (groups * draw(st.sampled_from([1, 2, 3, 9])) for _ in range(2))
    kernel = tuple(draw(st.sampled_from([1, 3])) for _ in range(rank))
    stride, dilation = draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([1, 1, 2]))
    before, after = draw(st.sampled_from([(1, 1), (1, 1), (2, 2), (2, 1)]))
    before, after = (before * dilation,) * rank, (after * dilation,) * rank
    size = tuple(draw(st.sampled_from([3, 5, 8, 14])) for _ in range(rank - 1))
    kinds = ["bias", "factor", "residual", "scale", "relu", "silu", "clip", "leaky_relu", "sigmoid"]
    steps = draw(st.lists(st.sampled_from(kinds), max_size=3))
    dtype = draw(st.sampled_from(dtypes))
    convolution = {1: op.nn.conv1d, 2: op.nn.conv2d, 3: op.nn.conv3d}[rank]
    flat = draw(st.booleans())
    each = (outputs, *(1,) * rank) if flat else (1, outputs, *(1,) * rank)
    emitted = {
        "bias": lambda y, b: op.add(y, b),
        "factor": lambda y, b: op.multiply(b, y),
        "scale": lambda y, b: op.multiply(y, relax.const(0.5, dtype)),
        "relu": lambda y, b: op.nn.relu(y),
        "silu": lambda y, b: op.nn.silu(y),
        "clip": lambda y, b: op.clip(y, 0, 6),
        "leaky_relu": lambda y, b: op.nn.leakyrelu(y, 0.25),
        "sigmoid": lambda y, b: op.sigmoid(y),
    }
    computed = {
        "bias": lambda y, b: y + b,
        "factor": lambda y, b: y * b,
        "scale": lambda y, b: y * 0.5,
        "clip": lambda y, b: np.clip(y, 0, 6),
        "leaky_relu": lambda y, b: ACTIVATIONS["leaky_relu"](y, 0.25),
        **{kind: lambda y, b, kind=kind: ACTIVATIONS[kind](y) for kind in ("relu", "silu", "sigmoid")},
    }

    def emit(bb, p):
        x, weight, b = p
        ways = {"strides": stride, "padding": [*before, *after], "dilation": dilation, "groups": groups}
        y = bb.emit(convolution(x, weight, **ways))
        first = y
        for kind in steps:
            # Another value of the same shape is a function of the convolution itself, which is read twice then.
            y = bb.emit(op.add(bb.emit(op.tanh(first)), y) if kind == "residual" else emitted[kind](y, b))
        return [y]

    def expected(values):
        x, weight, b = values
        y = convolve(x, weight, (stride,) * rank, before, after, (dilation,) * rank, groups)
        first = y
        for kind in steps:
            y = np.tanh(first) + y if kind == "residual" else computed[kind](y, b.astype("float64"))
        return [y]

    return build(
        draw, [("n", channels, *size, "m"), (outputs, channels // groups, *kernel), each], emit, expected, dtype
    )
