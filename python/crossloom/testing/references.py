"""Independent numpy references: computed in float64, the caller rounds once to the output's dtype."""

from __future__ import annotations

import math

import numpy as np

Array = np.ndarray


def softmax(x: Array, axis: int = -1) -> Array:
    """Return the softmax; a row that is ``-inf`` throughout gives zeros.

    Examples
    --------
    >>> softmax(np.array([[0.0, 0.0], [-np.inf, -np.inf]]))
    array([[0.5, 0.5],
           [0. , 0. ]])
    """
    x = x.astype("float64")
    top = x.max(axis=axis, keepdims=True, initial=-np.inf)
    e = np.exp(x - np.where(np.isfinite(top), top, 0.0))
    total = e.sum(axis=axis, keepdims=True)
    return np.divide(e, total, out=np.zeros_like(e), where=total > 0)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last axis (Zhang and Sennrich, 2019)."""
    x = x.astype("float64")
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * weight.astype("float64")


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Return layer normalization over the last axis, biased variance (Ba et al., 2016)."""
    x = x.astype("float64")
    centred = x - x.mean(-1, keepdims=True)
    scale = np.sqrt(np.square(centred).mean(-1, keepdims=True) + eps)
    return centred / scale * weight.astype("float64") + bias.astype("float64")


def silu(x: Array) -> Array:
    """Return ``x * sigmoid(x)``."""
    x = x.astype("float64")
    return x * 0.5 * (1.0 + np.tanh(0.5 * x))


def gelu(x: Array, kind: str = "erf") -> Array:
    """Return GELU: ``"erf"``, ``"tanh"`` (Hendrycks and Gimpel, 2016) or ``"quick"`` (``x sigmoid(1.702 x)``)."""
    x = x.astype("float64")
    if kind == "erf":
        return 0.5 * x * (1.0 + np.vectorize(math.erf, otypes=["float64"])(x / math.sqrt(2.0)))
    if kind == "tanh":
        return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    if kind == "quick":
        return silu(1.702 * x) / 1.702
    raise ValueError(f"unknown gelu {kind!r}: erf, tanh or quick")


def rotary(x: Array, angles: Array, convention: str = "half-split") -> Array:
    """Rotate pairs of the first ``2 * angles.shape[-1]`` features; later features pass (partial rotary).

    Parameters
    ----------
    x : numpy.ndarray, (..., seq, dim)
    angles : numpy.ndarray, (seq, rotated / 2)
        Radians. For 2-D positions, concatenate row angles and column angles along the last axis.
    convention : str
        ``"half-split"`` pairs (i, i + rotated/2); ``"interleaved"`` pairs (2i, 2i + 1) (Su et al., 2021).

    Examples
    --------
    >>> quarter = np.full((1, 2), math.pi / 2)
    >>> rotary(np.array([[1, 2, 3, 4, 9]]), quarter).round()
    array([[-3., -4.,  1.,  2.,  9.]])
    >>> rotary(np.array([[1, 2, 3, 4, 9]]), quarter, "interleaved").round()
    array([[-2.,  1., -4.,  3.,  9.]])
    """
    x, half = x.astype("float64"), angles.shape[-1]
    if convention == "half-split":
        first, second = np.arange(half), np.arange(half) + half
    elif convention == "interleaved":
        first, second = 2 * np.arange(half), 2 * np.arange(half) + 1
    else:
        raise ValueError(f"unknown rotary convention {convention!r}: half-split or interleaved")
    turned = x[..., first] + 1j * x[..., second]
    turned = turned * np.exp(1j * angles.astype("float64"))
    out = x.copy()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    causal: bool = False,
    scale: float | None = None,
    *,
    keep: Array | None = None,
    hidden: float = -math.inf,
) -> Array:
    """Return attention over (batch, heads, seq, dim); fewer key heads than query heads is GQA.

    Parameters
    ----------
    mask : numpy.ndarray, optional
        Added to the scores.
    causal : bool
        Hides later keys; the last query is aligned with the last key.
    scale : float, optional
        Of the scores; ``1 / sqrt(dim)`` when missing.
    keep : numpy.ndarray of bool, optional
        Where false, the score is ``hidden``.  A row that is ``-inf`` throughout gives zeros.
    """
    ratio = q.shape[1] // k.shape[1]
    k, v = (np.repeat(t.astype("float64"), ratio, axis=1) for t in (k, v))
    scores = np.einsum("bhqd,bhkd->bhqk", q.astype("float64"), k)
    scores = scores * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if mask is not None:
        scores = scores + mask.astype("float64")
    if keep is not None:
        scores = np.where(keep, scores, hidden)
    if causal:
        rows, columns = scores.shape[-2:]
        scores = np.where(np.arange(columns) <= np.arange(rows)[:, None] + columns - rows, scores, -np.inf)
    return np.einsum("bhqk,bhkd->bhqd", softmax(scores), v)


def gated_mlp(x: Array, gate: Array, up: Array, down: Array) -> Array:
    """Return ``(silu(x gate) * (x up)) down`` (Shazeer, 2020); weights are (in, out)."""
    x = x.astype("float64")
    return (silu(x @ gate.astype("float64")) * (x @ up.astype("float64"))) @ down.astype("float64")
