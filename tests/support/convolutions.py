"""What the tests of fused convolutions share: the convolution in numpy, tap by tap."""

from __future__ import annotations

import itertools
import math

import numpy as np

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
