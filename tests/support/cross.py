"""What the tests of cross-attention share: a decoder of several layers over an encoder's states, and a reference."""

from __future__ import annotations

import numpy as np
from tvm import relax

op = relax.op
WIDTH, HEADS, DIM = 8, 2, 4


def weights(layers, biased=True):
    """Return the shapes of the weights: q, k, v (its bias), o of each layer."""
    return [s for _ in range(layers) for s in ((WIDTH, 8), (6, 8), (6, 8), *([(8,)] if biased else []), (8, WIDTH))]


def decoder(e, h, states, *given, biased=True):
    """Return hidden states after cross-attention layers with residuals; k without a bias, as Whisper's."""
    count = 5 if biased else 4

    def heads(x):
        return e(op.reshape(x, [x.ty.shape[0], x.ty.shape[1], HEADS, DIM]))

    for i in range(0, len(given), count):
        q, k, v = (e(op.matmul(x, w)) for x, w in zip((h, states, states), given[i : i + 3]))
        v = e(op.add(v, given[i + 3])) if biased else v
        mixed = e(op.nn.attention(heads(q), heads(k), heads(v)))
        mixed = e(op.reshape(mixed, [h.ty.shape[0], h.ty.shape[1], HEADS * DIM]))
        h = e(op.add(h, e(op.matmul(mixed, given[i + count - 1]))))
    return h


def reference(h, states, *given, biased=True):
    """Return the same in float64."""
    count, h, states = 5 if biased else 4, h.astype("float64"), states.astype("float64")
    for i in range(0, len(given), count):
        q, k, v = (x @ w for x, w in zip((h, states, states), given[i : i + 3]))
        v = v + given[i + 3] if biased else v
        q, k, v = (x.reshape(*x.shape[:2], HEADS, DIM).transpose(0, 2, 1, 3) for x in (q, k, v))
        s = q @ k.transpose(0, 1, 3, 2) / np.sqrt(DIM)
        p = np.exp(s - s.max(-1, keepdims=True))
        mixed = (p / p.sum(-1, keepdims=True)) @ v
        h = h + mixed.transpose(0, 2, 1, 3).reshape(*h.shape[:2], -1) @ given[i + count - 1]
    return h
