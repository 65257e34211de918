"""Arithmetic on weights: computed at once where all operands are known, emitted where they are parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from tvm import relax

from crossloom.rewrite import Graph

from .spelling import dtype, is_constant, is_weight, only_rounds

#: A weight's value, or the expression that stands for it.
Value: TypeAlias = np.ndarray | relax.Expr

_SMALLEST = 2.0**-6
_VIEWS = frozenset({"relax.reshape", "relax.expand_dims", "relax.squeeze"})
_OPERATORS = frozenset(
    {"relax.astype", "relax.permute_dims", "relax.add", "relax.subtract", "relax.multiply", "relax.divide"}
    | {"relax.sqrt", "relax.rsqrt", "relax.negative"}
)


def of_weights(graph: Graph, expr: relax.Expr) -> bool:
    """Return whether a value is a weight, a constant, or views, casts and elementwise arithmetic of them alone."""
    todo, seen = [expr], set()
    while todo:
        leaf = todo.pop()
        if isinstance(leaf, relax.ShapeExpr) or leaf in seen or is_weight(graph, leaf):
            continue
        if graph.op(leaf) not in _VIEWS | _OPERATORS:
            return False
        seen.add(leaf)
        todo.extend(graph.resolve(leaf).args)
    return True


def known(graph: Graph, expr: relax.Expr) -> np.ndarray | None:
    """Return the value of a constant, behind views and casts between floats too, in float64."""
    shape = getattr(expr.ty, "shape", None)
    value = graph.resolve(expr)
    while isinstance(value, relax.Call) and (
        graph.op(value) in _VIEWS or (graph.op(value) == "relax.astype" and only_rounds(value))
    ):
        value = graph.resolve(value.args[0])
    if not is_constant(value) or not isinstance(shape, relax.ShapeExpr):
        return None
    return value.value.numpy().astype("float64").reshape([int(d) for d in shape])


class Arithmetic:
    """Operators on values of one element type.

    Parameters
    ----------
    emit : callable
        Of a block builder.
    kind : str
        Element type of what is emitted; what is known is computed in float64 and rounded to it once.
    """

    def __init__(self, emit: Callable[[relax.Expr], relax.Var], kind: str) -> None:
        self.emit, self.kind = emit, kind

    def expr(self, value: Value, kind: str | None = None) -> relax.Expr:
        """Return a value as an expression of an element type, the arithmetic's own where none is given."""
        kind = kind or self.kind
        if isinstance(value, np.ndarray):
            return relax.const(value.astype(kind), kind)
        return value if dtype(value) == kind else self.emit(relax.op.astype(value, kind))

    def __call__(self, name: str, *operands: Value) -> Value:
        """Return an operator of values, by the name that numpy and Relax have for it."""
        if all(isinstance(operand, np.ndarray) for operand in operands):
            with np.errstate(all="ignore"):
                return np.asarray(getattr(np, name)(*operands))
        return self.emit(getattr(relax.op, name)(*map(self.expr, operands)))

    def times(self, a: Value, b: Value) -> Value:
        """Return a product; one with the number 1 or 0 is none."""
        for value, other in ((a, b), (b, a)):
            if isinstance(value, np.ndarray) and value.ndim == 0 and value in (0, 1):
                return other if value == 1 else value
        return self("multiply", a, b)

    def plus(self, a: Value, b: Value) -> Value:
        """Return a sum; one with the number 0 is none."""
        for value, other in ((a, b), (b, a)):
            if isinstance(value, np.ndarray) and value.ndim == 0 and value == 0:
                return other
        return self("add", a, b)

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """Return a value in another shape."""
        if isinstance(value, np.ndarray):
            return value.reshape(shape)
        if [int(d) for d in value.ty.shape] == list(shape):
            return value
        return self.emit(relax.op.reshape(value, list(shape)))

    def transpose(self, value: Value) -> Value:
        """Return a matrix transposed."""
        return value.T if isinstance(value, np.ndarray) else self.emit(relax.op.permute_dims(value, [1, 0]))

    def sum(self, value: Value, axes: Sequence[int]) -> Value:
        """Return the sum over some axes."""
        if isinstance(value, np.ndarray):
            return value.sum(tuple(axes))
        return self.emit(relax.op.sum(value, list(axes)))


def keeps_half(factor: np.ndarray) -> bool:
    """Return whether float16 weights of usual size (some hundredths) times a factor are still of full precision."""
    size = np.abs(factor)
    return bool(np.all((size == 0) | ((size >= _SMALLEST) & (size <= 1 / _SMALLEST))))


def is_all(value: Value, number: float) -> bool:
    """Return whether a value is known and one number throughout."""
    return isinstance(value, np.ndarray) and bool(np.all(value == number))
