"""What a group of bindings says, apart from its names: equal layers say the same, and their region is made once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeAlias

from tvm import relax, tirx

from .graph import Graph
from .sizes import dimensions, is_size

#: Equal for groups whose regions are structurally equal.
Spelling: TypeAlias = Hashable


class _Unspelled(Exception):
    """It cannot be told cheaply."""


def spelling(
    graph: Graph, inputs: Sequence[relax.Expr], members: Sequence[relax.Var], outputs: Sequence[relax.Var]
) -> Spelling | None:
    """Return what a group says; None where comparing it costs as much as making its region.

    Parameters
    ----------
    graph : Graph
    inputs : sequence of relax.Expr
        What members read and do not define.
    members, outputs : sequence of relax.Var
        In program order.
    """
    numbers: dict[relax.Expr, int] = {expr: i for i, expr in enumerate([*inputs, *members])}
    try:
        types = tuple(_type(expr) for expr in inputs)
        lines = tuple(_line(graph.value[var], numbers) for var in members)
    except _Unspelled:
        return None
    return types, lines, tuple(numbers[var] for var in outputs)


def _type(expr: relax.Expr) -> Hashable:
    ty = expr.ty
    if not isinstance(ty, relax.TensorType) or ty.shape is None or ty.vdevice is not None:
        raise _Unspelled
    return (str(ty.dtype), *(_size(extent) for extent in dimensions(expr)))


def _size(extent: tirx.Expr) -> Hashable:
    if isinstance(extent, (int, tirx.IntImm)):
        return int(extent)
    if isinstance(extent, tirx.Var):
        # TVM hashes a variable by its address, and comparing two of them gives an expression.
        return ("size", hash(extent))
    raise _Unspelled


def _line(expr: relax.Expr, numbers: dict[relax.Expr, int]) -> Hashable:
    kind = type(expr)
    if kind is relax.Call:
        if expr.ty_args:
            raise _Unspelled
        attrs = None if expr.attrs is None else hash(expr.attrs)
        return ("call", hash(expr.op), attrs, *(_line(arg, numbers) for arg in expr.args))
    if kind is relax.Tuple:
        return ("tuple", *(_line(field, numbers) for field in expr.fields))
    if kind is relax.TupleGetItem:
        return ("item", int(expr.index), _line(expr.tuple_value, numbers))
    if isinstance(expr, relax.ShapeExpr):
        return ("shape", *(_size(extent) for extent in expr.values))
    if is_size(expr):
        return _size(expr)
    if isinstance(expr, relax.Var):
        return numbers[expr]
    return ("constant", hash(expr))
