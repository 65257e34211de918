"""Converters of operators that TVM's ONNX frontend lacks: the norms and rotary embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax

from crossloom.errors import UnsupportedModel

op = relax.op
Converter = Callable[["Call"], list[Any]]


class Call:
    """One node being converted: its name for messages, its operands, and a way to emit.

    Parameters
    ----------
    where : str
    bb : relax.BlockBuilder
    inputs : list of relax.Expr or None
    attrs : dict
    arrays : list of numpy.ndarray or None
        Value of each operand that is constant.
    outputs : list of str
        Empty strings are outputs nobody asked for.
    known : list of Value or None
        Each operand that is known integers or symbolic sizes.
    opset : int
        Version of the default operator set.
    """

    def __init__(
        self,
        where: str,
        bb: Any,
        inputs: list[Any],
        attrs: dict[str, Any],
        arrays: list[Any],
        outputs: list[str],
        known: list[Any],
        opset: int,
    ) -> None:
        self.where, self.bb, self.inputs, self.attrs = where, bb, inputs, attrs
        self.arrays, self.outputs, self.known, self.opset = arrays, outputs, known, opset

    def arg(self, index: int) -> Any:
        """Return an operand, None where it is absent."""
        return self.inputs[index] if index < len(self.inputs) else None

    def need(self, index: int) -> Any:
        """Return an operand; UnsupportedModel where it is absent."""
        value = self.arg(index)
        if value is None:
            raise UnsupportedModel(f"{self.where}: operand {index} is missing", "export the model again")
        return value

    def emit(self, expr: Any) -> Any:
        """Bind an expression to a variable and return that."""
        return self.bb.emit(expr)

    def refuse(self, **allowed: Any) -> None:
        """Refuse attributes whose value is not the one given."""
        for name, value in allowed.items():
            if self.attrs.get(name, value) != value:
                raise UnsupportedModel(
                    f"{self.where}: {name}={self.attrs[name]} is not supported", f"use {name}={value}"
                )


def dtype_of(x: Any) -> str:
    """Return the element type as text."""
    return str(x.ty.dtype)


def dims_of(x: Any) -> list[Any]:
    """Return the sizes of a tensor of known shape (elements), ints where fixed."""
    return [int(d) if hasattr(d, "value") else d for d in x.ty.shape.values]


def _norm(c: Call, x: Any, gamma: Any, beta: Any, axis: int, default_eps: float, rms: bool) -> list[Any]:
    """Normalise in float32; return ``(y, mean, inverse deviation)`` with only the asked-for statistics."""
    eps, dtype, rank = float(c.attrs.get("epsilon", default_eps)), dtype_of(x), x.ty.ndim
    axes = list(range(axis % rank, rank))
    if rms:
        wide = x if dtype == "float32" else c.emit(op.astype(x, "float32"))
        g = gamma if dtype_of(gamma) == "float32" else c.emit(op.astype(gamma, "float32"))
        y = c.emit(op.nn.rms_norm(wide, g, axes, eps))
        y = y if dtype == "float32" else c.emit(op.astype(y, dtype))
    else:
        beta = relax.const(np.zeros(dims_of(gamma), dtype_of(gamma))) if beta is None else beta
        y = c.emit(op.nn.layer_norm(x, gamma, beta, axes, eps))
    mean = inverse = None
    if any(c.outputs[1:3]):
        wide = c.emit(op.astype(x, "float32"))
        mean = c.emit(op.mean(wide, axes, True))
        if not rms:
            wide = c.emit(op.subtract(wide, mean))
        square = c.emit(op.mean(c.emit(op.multiply(wide, wide)), axes, True))
        inverse = c.emit(op.rsqrt(c.emit(op.add(square, relax.const(eps, "float32")))))
    return [y, mean, inverse]


def simplified_layer_norm(c: Call) -> list[Any]:
    """com.microsoft SimplifiedLayerNormalization: RMSNorm over the axes from ``axis`` on."""
    y, _, inverse = _norm(c, c.need(0), c.need(1), None, int(c.attrs.get("axis", -1)), 1e-5, True)
    return [y, inverse]


def layer_norm(c: Call) -> list[Any]:
    """LayerNormalization over the axes from ``axis`` on; the bias may be absent."""
    return _norm(c, c.need(0), c.need(1), c.arg(2), int(c.attrs.get("axis", -1)), 1e-5, False)


def _skip(c: Call, rms: bool) -> list[Any]:
    total = c.emit(op.add(c.need(0), c.need(1)))
    bias = c.arg(3 if rms else 4)
    if bias is not None:
        total = c.emit(op.add(total, bias))
    y, mean, inverse = _norm(c, total, c.need(2), None if rms else c.arg(3), -1, 1e-12, rms)
    return [y, mean, inverse, total]


def skip_layer_norm(c: Call) -> list[Any]:
    """com.microsoft SkipLayerNormalization: the layer norm of input + skip + bias, and that sum."""
    return _skip(c, False)


def skip_simplified_layer_norm(c: Call) -> list[Any]:
    """com.microsoft SkipSimplifiedLayerNormalization: the RMSNorm of input + skip + bias, and that sum."""
    return _skip(c, True)


def rotate(c: Call, x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Rotate x (batch, heads, seq, dim) by tables (batch or 1, seq, r / 2); lanes from r on pass through."""
    batch, heads, seq, dim = dims_of(x)
    half = dims_of(cos)[-1]
    r = 2 * half
    if r > dim:
        raise UnsupportedModel(f"{c.where}: tables are wider than the head ({r} > {dim})", "correct cos_cache")
    cos, sin = (c.emit(op.expand_dims(t, 1)) for t in (cos, sin))

    def part(lo: int, hi: int, step: int = 1) -> Any:
        return c.emit(op.strided_slice(x, [3], [lo], [hi], [step]))

    a, b = (part(0, r, 2), part(1, r, 2)) if interleaved else (part(0, half), part(half, r))
    mul = lambda p, q: c.emit(op.multiply(p, q))
    first = c.emit(op.subtract(mul(a, cos), mul(b, sin)))
    second = c.emit(op.add(mul(a, sin), mul(b, cos)))
    if interleaved:
        pair = c.emit(op.concat([op.expand_dims(first, -1), op.expand_dims(second, -1)], -1))
        pieces = [c.emit(op.reshape(pair, [batch, heads, seq, r]))]
    else:
        pieces = [first, second]
    if r < dim:
        pieces.append(part(r, dim))
    return pieces[0] if len(pieces) == 1 else c.emit(op.concat(pieces, -1))


def rotary_embedding(c: Call) -> list[Any]:
    """com.microsoft RotaryEmbedding: x (B, S, H*D) or (B, H, S, D); positions (1,) offset or (B, S)."""
    c.refuse(is_packed_batching=0, scale=1.0)
    x, pos, cos, sin = (c.need(i) for i in range(4))
    flat = x.ty.ndim == 3
    partial = int(c.attrs.get("rotary_embedding_dim", 0))
    half = dims_of(cos)[-1]
    if partial and partial != 2 * half:
        raise UnsupportedModel(
            f"{c.where}: rotary_embedding_dim={partial} but cos_cache has {half} columns", "they must agree"
        )
    shape = dims_of(x)
    if flat:
        heads = int(c.attrs.get("num_heads", 0))
        if partial and not heads:
            raise UnsupportedModel(f"{c.where}: needs num_heads with rotary_embedding_dim", "set num_heads")
        dim = shape[2] // heads if heads else 2 * half
        x = c.emit(op.reshape(x, [shape[0], shape[1], shape[2] // dim, dim]))
        x = c.emit(op.permute_dims(x, [0, 2, 1, 3]))
    seq = dims_of(x)[2]
    if pos.ty.ndim == 1:
        pos = c.emit(op.add(op.expand_dims(op.arange(0, seq, 1, "int64"), 0), op.expand_dims(pos, 0)))
    y = rotate(c, x, c.emit(op.take(cos, pos, 0)), c.emit(op.take(sin, pos, 0)), bool(c.attrs.get("interleaved", 0)))
    if flat:
        y = c.emit(op.reshape(c.emit(op.permute_dims(y, [0, 2, 1, 3])), shape))
    return [y]


def clip(c: Call) -> list[Any]:
    """Clip, its bounds operands or (before opset 11) attributes; a bound that is absent does not bind."""
    y = c.need(0)
    for index, name, bound in ((1, "min", op.maximum), (2, "max", op.minimum)):
        limit = c.arg(index)
        if limit is None and name in c.attrs:
            limit = relax.const(float(c.attrs[name]), dtype_of(y))
        if limit is not None:
            y = c.emit(bound(y, limit))
    return [y]


def power(c: Call) -> list[Any]:
    """Pow: since opset 12 the exponent may have another type; the result has the base's."""
    base, exponent = c.need(0), c.need(1)
    dtype = dtype_of(base)
    if dtype == dtype_of(exponent):
        return [c.emit(op.power(base, exponent))]
    if "int" in dtype and "int" not in dtype_of(exponent):
        wide = c.emit(op.power(c.emit(op.astype(base, "float64")), c.emit(op.astype(exponent, "float64"))))
        return [c.emit(op.astype(wide, dtype))]
    return [c.emit(op.power(base, c.emit(op.astype(exponent, dtype))))]


def top_k(c: Call) -> list[Any]:
    """TopK: the count an attribute before opset 10 and an operand since; the least instead since 11."""
    x, dims = c.need(0), dims_of(c.need(0))
    axis, count = int(c.attrs.get("axis", -1)), int(c.attrs.get("k", 0))
    if c.opset >= 10:
        known = c.known[1].list() if len(c.known) > 1 and c.known[1] is not None else []
        if len(known) != 1 or not isinstance(known[0], int):
            raise UnsupportedModel(f"{c.where}: K is not constant", "store it as an initializer")
        count = known[0]
    if not -len(dims) <= axis < len(dims) or count < 0 or (isinstance(dims[axis], int) and count > dims[axis]):
        raise UnsupportedModel(f"{c.where}: the {count} first of axis {axis} of shape {dims}", "correct K or the axis")
    best = c.emit(op.topk(x, count, axis, "both", bool(c.attrs.get("largest", 1)), "int64"))
    return [c.emit(relax.TupleGetItem(best, i)) for i in range(2)]


NORMS: dict[tuple[str, str], Converter] = {
    ("com.microsoft", "SimplifiedLayerNormalization"): simplified_layer_norm,
    ("com.microsoft", "SkipLayerNormalization"): skip_layer_norm,
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): skip_simplified_layer_norm,
    ("com.microsoft", "RotaryEmbedding"): rotary_embedding,
    ("", "LayerNormalization"): layer_norm,
    ("", "Clip"): clip,
    ("", "Pow"): power,
    ("", "TopK"): top_k,
}
