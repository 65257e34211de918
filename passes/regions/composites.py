"""Calls of the composites that regions are made of, for passes that take a larger one apart.

What comes out is what :mod:`crossloom.passes.canonicalize_linear` and :mod:`~crossloom.passes.canonicalize_activation`
make of the plainest spelling.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax

from crossloom.rewrite import Site, outline

from ..matching.spelling import dtype

_OPERATORS: dict[str, Callable[[relax.Expr], relax.Expr]] = {
    "silu": relax.op.nn.silu,
    "gelu": relax.op.nn.gelu,
    "gelu_tanh": relax.op.nn.gelu_tanh,
}
#: Kinds that :func:`activation` knows.
ACTIVATION_KINDS = frozenset({"relu", "quick_gelu", *_OPERATORS})


def linear(
    site: Site, x: relax.Expr, weight: relax.Expr, bias: relax.Expr | None = None, layout: str = "in_out"
) -> relax.Call:
    """Return a call of ``crossloom.linear``.

    Parameters
    ----------
    site : Site
        Its module gets the composite.
    x : relax.Expr
        (..., depth).
    weight : relax.Expr
        (depth, columns), or (columns, depth) where ``layout`` is ``out_in``; of x's element type.
    bias : relax.Expr or None
        One value per column; leading axes of size 1 are allowed.
    layout : str
    """

    def body(builder: relax.BlockBuilder, x: relax.Var, weight: relax.Var, bias: relax.Var | None = None) -> relax.Expr:
        across = weight if layout == "in_out" else builder.emit(relax.op.permute_dims(weight, [1, 0]))
        product = relax.op.matmul(x, across)
        return product if bias is None else relax.op.add(builder.emit(product), bias)

    inputs = {"x": x, "weight": weight} if bias is None else {"x": x, "weight": weight, "bias": bias}
    return outline(site, "crossloom.linear", inputs, body, {"weight_layout": layout})


def activation(site: Site, x: relax.Expr, kind: str) -> relax.Call:
    """Return an activation of a value: ReLU as the operator, all others as a call of ``crossloom.activation``.

    Parameters
    ----------
    site : Site
        Its module gets the composite.
    x : relax.Expr
        Half precision is computed in float32 and rounded once.
    kind : str
        One of :data:`ACTIVATION_KINDS`.
    """
    if kind == "relu":
        return relax.op.nn.relu(x)

    def body(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        narrow = dtype(x)
        widened = narrow in ("float16", "bfloat16")
        value = builder.emit(relax.op.astype(x, "float32")) if widened else x
        if kind == "quick_gelu":
            scaled = builder.emit(relax.op.multiply(value, relax.const(1.702, dtype(value))))
            result = relax.op.multiply(value, builder.emit(relax.op.sigmoid(scaled)))
        else:
            result = _OPERATORS[kind](value)
        return relax.op.astype(builder.emit(result), narrow) if widened else result

    return outline(site, "crossloom.activation", {"x": x}, body, {"kind": kind})
