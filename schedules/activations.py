"""Activations and other functions of one or two values, as TIR expressions that vectorize."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from tvm import ir, tirx

Expr: TypeAlias = ir.Expr

#: Functions of one value that a linear layer's result, or a gate, may go through.
ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh", "quick_gelu", "sigmoid", "tanh")


def activate(kind: str, x: Expr) -> Expr:
    """Return an activation of a float value.

    Parameters
    ----------
    kind : str
        One of :data:`ACTIVATIONS`, or ``""`` for none.
    x : tvm.ir.Expr
        A float, or a vector of floats.

    Raises
    ------
    ValueError
        For any other kind.
    """
    dtype = str(x.ty.dtype)

    def number(value: float) -> Expr:
        return tirx.const(value, dtype)

    if kind == "":
        return x
    if kind == "relu":
        return tirx.max(x, number(0.0))
    if kind == "silu":
        return x * tirx.sigmoid(x)
    if kind == "quick_gelu":
        return x * tirx.sigmoid(x * number(1.702))
    if kind == "sigmoid":
        return tirx.sigmoid(x)
    if kind == "tanh":
        return tirx.tanh(x)
    if kind == "gelu":
        return x * (number(0.5) + number(0.5) * tirx.erf(x * number(math.sqrt(0.5))))
    if kind == "gelu_tanh":
        inner = number(math.sqrt(2 / math.pi)) * (x + number(0.044715) * x * x * x)
        return number(0.5) * x * (number(1.0) + tirx.tanh(inner))
    raise ValueError(f"no activation {kind!r}")


#: Functions of one value.
UNARY: dict[str, Callable[[Expr], Expr]] = {
    "negative": lambda x: tirx.const(0.0, str(x.ty.dtype)) - x,
    "abs": tirx.abs,
    "square": lambda x: x * x,
    "sqrt": tirx.sqrt,
    "rsqrt": lambda x: tirx.const(1.0, str(x.ty.dtype)) / tirx.sqrt(x),
    "exp": tirx.exp,
    **{kind: lambda x, kind=kind: activate(kind, x) for kind in ACTIVATIONS},  # type: ignore[misc]
}
#: Functions of two values; the first is what came before.
BINARY: dict[str, Callable[[Expr, Expr], Expr]] = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x / y,
    "maximum": tirx.max,
    "minimum": tirx.min,
}
