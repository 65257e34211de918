"""Vectors, and numbers of their rows: what a graph's values are, not how they are spelled.

A *vector* value is a sum of operands times numbers of their rows; a product of two such is a sum of products of
operands, and its sum over the vector a number; numbers are functions of numbers.  So ``sum(a / |a| * b / |b|)`` is
``a.b * (1 / |a|) * (1 / |b|)``, whatever the order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tvm import relax
from tvm_ffi import structural_equal

from crossloom.rewrite import Graph
from crossloom.schedules.semantic_gate import Apply, Dot, Given, Number, Scalar, dots_of

from ..matching.spelling import dims, dtype, extents, is_constant, number, only_rounds, same_dims, scalar
from .linear import NoKernel

_ONE = Number(1.0)
_UNARY = ("sqrt", "rsqrt", "sigmoid", "exp", "tanh", "negative", "abs")
_BINARY = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "power")


@dataclass(frozen=True)
class Key:
    """An operand, and which of its leading axes each axis of the rows is (None: stretched)."""

    place: int
    axes: tuple[int | None, ...]


@dataclass(frozen=True)
class RowNumber:
    """One number a row; ``units`` axes of size 1 stand behind the rows."""

    value: Scalar
    rank: int
    units: int


@dataclass(frozen=True)
class Vector:
    """A sum of operands times numbers; ``behind`` tells a column ``(rows, d, 1)`` from a row."""

    terms: tuple[tuple[Key, Scalar], ...]
    rank: int
    behind: int = 0
    absolute: bool = False


@dataclass(frozen=True)
class Products:
    """Products of operands element by element, times numbers."""

    terms: tuple[tuple[Key, Key, Scalar], ...]
    rank: int


Value = RowNumber | Vector | Products


def apply(name: str, *args: Scalar) -> Scalar:
    """Return a function of numbers, products with 1 left out."""
    if name == "multiply" and _ONE in args:
        return args[1] if args[0] == _ONE else args[0]
    if name == "divide" and args[1] == _ONE:
        return args[0]
    return Apply(name, args)


def _rekeyed(value: Scalar, change: Callable[[Key], Key]) -> Scalar:
    if isinstance(value, Dot):
        return Dot(change(value.left), change(value.right))
    return Apply(value.name, tuple(_rekeyed(a, change) for a in value.args)) if isinstance(value, Apply) else value


def _changed(value: Value, rank: int, change: Callable[[Key], Key]) -> Value:
    if isinstance(value, RowNumber):
        return replace(value, value=_rekeyed(value.value, change), rank=rank)
    if isinstance(value, Vector):
        return replace(value, terms=tuple((change(k), _rekeyed(f, change)) for k, f in value.terms), rank=rank)
    terms = tuple((change(a), change(b), _rekeyed(f, change)) for a, b, f in value.terms)
    return replace(value, terms=terms, rank=rank)


def widened(value: Value, rank: int) -> Value:
    """Return a value with axes in front of its rows, up to a rank."""
    more = (None,) * (rank - value.rank)
    return _changed(value, rank, lambda key: replace(key, axes=(*more, *key.axes))) if more else value


def _aligned(left: Value, right: Value) -> tuple[Value, Value]:
    rank = max(left.rank, right.rank)
    return widened(left, rank), widened(right, rank)


class GateReader:
    """Reads bindings as vectors and numbers of their rows.

    Parameters
    ----------
    graph : Graph
    members : set of relax.Var
        Bindings that are read through; all others are operands.
    width : int
        Elements of a vector, more than 1.
    """

    def __init__(self, graph: Graph, members: frozenset[relax.Var], width: int) -> None:
        self.graph, self.members, self.width = graph, members, width
        self.operands: list[relax.Expr] = []
        self.given: list[relax.Expr] = []
        self.values: dict[relax.Var, Value] = {}

    # Operands ----------------------------------------------------------------------------------------------------

    def _place(self, among: list[relax.Expr], expr: relax.Expr) -> int:
        for i, known in enumerate(among):
            if known.same_as(expr):
                return i
        among.append(expr)
        return len(among) - 1

    def value(self, expr: relax.Expr) -> Value:
        """Return what an operand of a binding is."""
        if isinstance(expr, relax.Var) and expr in self.members:
            if expr not in self.values:
                self.values[expr] = self._read(expr)
            return self.values[expr]
        shape = dims(expr)
        if is_constant(expr) and (known := scalar(self.graph, expr)) is not None:
            return RowNumber(Number(known), 0, 0)
        if shape is None or "float" not in dtype(expr) or is_constant(expr):
            raise NoKernel("an operand that is no tensor of floats")
        if all(number(d) == 1 for d in shape):
            return RowNumber(Given(self._place(self.given, expr)), 0, 0)
        if number(shape[-1]) != self.width:
            raise NoKernel("an operand of another width")
        axes = tuple(None if number(d) == 1 else i for i, d in enumerate(shape[:-1]))
        return Vector(((Key(self._place(self.operands, expr), axes), _ONE),), len(axes))

    # Bindings ----------------------------------------------------------------------------------------------------

    def _read(self, var: relax.Var) -> Value:
        graph, call = self.graph, self.graph.value[var]
        op = graph.op(var).removeprefix("relax.")
        if isinstance(call, relax.Var) or is_constant(call):
            return self.value(call)
        if not isinstance(call, relax.Call) or not op:
            raise NoKernel(f"{var.name}: a call of something else")
        if op == "astype" and only_rounds(call):
            return self.value(call.args[0])
        if op in ("expand_dims", "squeeze", "reshape", "broadcast_to", "permute_dims"):
            return self._viewed(op, self.value(call.args[0]), call, var)
        if op == "sum":
            return self._summed(self.value(call.args[0]), call, var)
        if op == "matmul":
            return self._matmul(self.value(call.args[0]), self.value(call.args[1]), var)
        if op == "square":
            inner = self.value(call.args[0])
            return self._product(inner, inner, var)
        if op == "clip":
            return self._clipped(self.value(call.args[0]), call, var)
        if op in _UNARY:
            return self._unary(op, self.value(call.args[0]), var)
        if op in _BINARY:
            return self._binary(op, self.value(call.args[0]), self.value(call.args[1]), var)
        raise NoKernel(f"{var.name}: {op} is no step of a gate")

    def _viewed(self, op: str, value: Value, call: relax.Call, var: relax.Var) -> Value:
        before, after = (extents(e) for e in (call.args[0], var))
        if isinstance(value, Products):
            raise NoKernel(f"{var.name}: a view of a product")
        tail = value.units if isinstance(value, RowNumber) else 1 + value.behind
        known = isinstance(value, RowNumber) and not dots_of(value.value)
        if known and op != "permute_dims":
            # A number that no row changes may stand anywhere.
            return value
        if op == "broadcast_to":
            return self._spread(value, before, after, var)
        if op == "permute_dims":
            return self._turned(value, call, len(before), var)
        inserted = _inserted(before, after) if op != "squeeze" else None
        removed = _inserted(after, before) if inserted is None else None
        if op == "expand_dims":
            inserted = sorted(int(a) % len(after) for a in call.attrs.axis)
        if inserted is not None:
            for place in inserted:
                value, tail = self._with_axis(value, place, tail)
            return value
        for place in reversed(removed or ()):
            value, tail = self._without_axis(value, place, tail, var)
        if removed is None:
            raise NoKernel(f"{var.name}: a view of other axes")
        return value

    @staticmethod
    def _with_axis(value: Value, place: int, tail: int) -> tuple[Value, int]:
        if place > value.rank or (place == value.rank and isinstance(value, RowNumber)):
            if isinstance(value, RowNumber):
                return replace(value, units=value.units + 1), tail + 1
            assert isinstance(value, Vector)
            return replace(value, behind=value.behind + 1), tail + 1
        rank = value.rank + 1
        axes = lambda key: replace(key, axes=(*key.axes[:place], None, *key.axes[place:]))
        return _changed(value, rank, axes), tail

    @staticmethod
    def _without_axis(value: Value, place: int, tail: int, var: relax.Var) -> tuple[Value, int]:
        if place < value.rank:
            axes = lambda key: replace(key, axes=(*key.axes[:place], *key.axes[place + 1 :]))
            return _changed(value, value.rank - 1, axes), tail
        if isinstance(value, RowNumber) and value.units:
            return replace(value, units=value.units - 1), tail - 1
        if isinstance(value, Vector) and value.behind and place > value.rank:
            return replace(value, behind=value.behind - 1), tail - 1
        raise NoKernel(f"{var.name}: a view without the vector")

    def _spread(self, value: Value, before: Sequence[object], after: Sequence[object], var: relax.Var) -> Value:
        """Read a broadcast: of rows that are stretched, or of a number over its vector."""
        if len(before) != len(after):
            raise NoKernel(f"{var.name}: a broadcast to more axes")
        rows = value.rank
        if isinstance(value, RowNumber) and value.units == 1 and after[-1] == self.width and rows == len(after) - 1:
            return value
        if same_dims(before[rows:], after[rows:]):
            return value
        raise NoKernel(f"{var.name}: a broadcast along the vector")

    @staticmethod
    def _turned(value: Value, call: relax.Call, rank: int, var: relax.Var) -> Value:
        """Read the transposition that makes a row of a matrix a column."""
        axes = call.attrs.axes
        order = list(range(rank))[::-1] if axes is None else [int(a) % rank for a in axes]
        swapped = [*range(rank - 2), rank - 1, rank - 2]
        if not isinstance(value, Vector) or order != swapped or rank < 2:
            raise NoKernel(f"{var.name}: a transposition of rows")
        if value.behind == 0 and all(key.axes[-1] is None for key, _ in value.terms):
            drop = lambda key: replace(key, axes=key.axes[:-1])
            return replace(_changed(value, value.rank - 1, drop), behind=1)  # type: ignore[arg-type]
        if value.behind == 1:
            add = lambda key: replace(key, axes=(*key.axes, None))
            return replace(_changed(value, value.rank + 1, add), behind=0)  # type: ignore[arg-type]
        raise NoKernel(f"{var.name}: a transposition of rows")

    # Arithmetic --------------------------------------------------------------------------------------------------

    def _product(self, left: Value, right: Value, var: relax.Var) -> Products:
        left, right = _aligned(left, right)
        if not isinstance(left, Vector) or not isinstance(right, Vector) or left.behind or right.behind:
            raise NoKernel(f"{var.name}: a product of other than two vectors")
        if left.absolute != right.absolute or (left.absolute and left.terms != right.terms):
            raise NoKernel(f"{var.name}: a product with an absolute value")
        terms = [(a, b, apply("multiply", f, g)) for a, f in left.terms for b, g in right.terms]
        return Products(tuple(terms), left.rank)

    def _summed(self, value: Value, call: relax.Call, var: relax.Var) -> RowNumber:
        rank = len(dims(call.args[0]) or ())
        axes = [int(a) % rank for a in call.attrs.axis] if call.attrs.axis is not None else []
        if not isinstance(value, Products) or axes != [rank - 1]:
            raise NoKernel(f"{var.name}: a sum of other than a product along the vector")
        return RowNumber(_total(value.terms), value.rank, int(bool(call.attrs.keepdims)))

    def _matmul(self, left: Value, right: Value, var: relax.Var) -> RowNumber:
        if not isinstance(left, Vector) or not isinstance(right, Vector) or left.behind or left.absolute:
            raise NoKernel(f"{var.name}: a product of other than vectors")
        if right.absolute or (right.behind == 0 and right.rank > 0) or right.behind > 1:
            raise NoKernel(f"{var.name}: a product of all rows with all others")
        # (rows, m, d) @ (rows, d, 1): the column's rows are those in front of m.
        units = right.behind
        if right.behind:
            column = replace(right, behind=0)
            column = _changed(column, right.rank + 1, lambda key: replace(key, axes=(*key.axes, None)))  # type: ignore
        else:
            column = right
        first, second = _aligned(left, column)
        product = self._product(first, second, var)
        if all(key.axes[-1:] == (None,) for key, _ in left.terms):
            # The matrix had one row, put there for the product.
            one = _changed(product, product.rank - 1, lambda key: replace(key, axes=key.axes[:-1]))
            assert isinstance(one, Products)
            return RowNumber(_total(one.terms), one.rank, units + 1)
        return RowNumber(_total(product.terms), product.rank, units)

    def _clipped(self, value: Value, call: relax.Call, var: relax.Var) -> Value:
        if not isinstance(value, RowNumber):
            raise NoKernel(f"{var.name}: a bound on a vector")
        low, high = (float(getattr(a, "value", np.nan)) for a in call.args[1:3])
        out = value.value
        if low != -np.inf:
            out = apply("maximum", out, Number(low))
        if high != np.inf:
            out = apply("minimum", out, Number(high))
        return replace(value, value=out)

    def _unary(self, op: str, value: Value, var: relax.Var) -> Value:
        if isinstance(value, RowNumber):
            return replace(value, value=apply(op, value.value))
        if isinstance(value, Vector) and op == "abs":
            return replace(value, absolute=True)
        if isinstance(value, Vector) and op == "negative" and not value.absolute:
            return _scaled(value, Number(-1.0))
        raise NoKernel(f"{var.name}: {op} of a vector")

    def _binary(self, op: str, left: Value, right: Value, var: relax.Var) -> Value:
        if isinstance(left, RowNumber) and isinstance(right, RowNumber):
            return self._numbers(op, left, right, var)
        left, right = _aligned(left, right)
        if op == "power" and isinstance(left, Vector) and isinstance(right, RowNumber) and right.value == Number(2.0):
            return self._product(left, left, var)
        if op == "multiply" and isinstance(left, Vector) and isinstance(right, Vector):
            return self._product(left, right, var)
        if op in ("add", "subtract") and isinstance(left, Vector) and isinstance(right, Vector):
            return self._combined(left, right if op == "add" else _scaled(right, Number(-1.0)), var)
        if op == "multiply" and isinstance(left, RowNumber):
            left, right = right, left
        fits = isinstance(left, Vector) and isinstance(right, RowNumber) and not left.behind and not left.absolute
        if op in ("multiply", "divide") and fits and (right.units == 1 or not dots_of(right.value)):  # type: ignore
            factor = right.value if op == "multiply" else apply("divide", _ONE, right.value)  # type: ignore
            return _scaled(left, factor)  # type: ignore[arg-type]
        raise NoKernel(f"{var.name}: {op} of other values")

    @staticmethod
    def _numbers(op: str, left: RowNumber, right: RowNumber, var: relax.Var) -> RowNumber:
        free = [not dots_of(v.value) for v in (left, right)]
        if not any(free) and left.units != right.units:
            raise NoKernel(f"{var.name}: numbers of different rows")
        one = right if free[0] and not free[1] else left
        first, second = _aligned(left, right)
        assert isinstance(first, RowNumber) and isinstance(second, RowNumber)
        return replace(first, value=apply(op, first.value, second.value), units=one.units)

    @staticmethod
    def _combined(left: Vector, right: Vector, var: relax.Var) -> Vector:
        if left.behind or right.behind or left.absolute or right.absolute:
            raise NoKernel(f"{var.name}: a sum of other vectors")
        terms = dict(left.terms)
        for key, factor in right.terms:
            terms[key] = apply("add", terms[key], factor) if key in terms else factor
        return replace(left, terms=tuple(terms.items()))


def _scaled(value: Vector, factor: Scalar) -> Vector:
    return replace(value, terms=tuple((key, apply("multiply", f, factor)) for key, f in value.terms))


def _total(terms: Sequence[tuple[Key, Key, Scalar]]) -> Scalar:
    out: Scalar | None = None
    for left, right, factor in terms:
        first, second = sorted((left, right), key=lambda k: (k.place, str(k.axes)))
        term = apply("multiply", Dot(first, second), factor)
        out = term if out is None else apply("add", out, term)
    return Number(0.0) if out is None else out


def _inserted(before: Sequence[object], after: Sequence[object]) -> list[int] | None:
    """Return where axes of size 1 are put into a shape to make another; None where it takes more."""
    out, rest = [], list(before)
    for place, extent in enumerate(after):
        if rest and (rest[0] is extent or (type(rest[0]) is type(extent) and structural_equal(rest[0], extent))):
            rest.pop(0)
        elif extent == 1 and isinstance(extent, int):
            out.append(place)
        else:
            return None
    return None if rest else out
