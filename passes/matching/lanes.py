"""Which input lanes make an output lane: the algebra by which rotary embeddings are told apart.

A value is a sum of terms; a term is a coefficient times up to two factors, a factor a lane of a leaf.  Index
operators (slice, split, concat, stack, reshape of the last axes) move lanes, arithmetic combines terms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from tvm import relax, tirx

from crossloom.rewrite import Graph

from .spelling import dims, either, fields_of, is_constant, only_rounds, same_dims, scalar, sizes

#: More lines than any spelling of a rotation has.
MOST_NODES = 48

#: More summands than any spelling of a rotation has; chains of rotations would double theirs at every step.
MOST_TERMS = 32

#: What the algebra knows.
OPERATORS = frozenset(
    {
        "relax.add",
        "relax.subtract",
        "relax.multiply",
        "relax.negative",
        "relax.astype",
        "relax.strided_slice",
        "relax.split",
        "relax.concat",
        "relax.stack",
        "relax.reshape",
        "relax.expand_dims",
        "relax.squeeze",
        "relax.take",
    }
)


class NotLanes(Exception):
    """The value is not made of lanes of the leaves by operators this algebra knows."""


@dataclass(frozen=True)
class Term:
    """Coefficients and factors of one summand, arrays of the tail's shape; coefficient 0 means absent."""

    coefficient: np.ndarray
    factors: tuple[tuple[relax.Expr, np.ndarray], ...]

    def map(self, move: Callable[[np.ndarray], np.ndarray]) -> Term:
        """Return the term with every array moved."""
        return Term(move(self.coefficient), tuple((leaf, move(lanes)) for leaf, lanes in self.factors))


Lanes = list[Term]


def _tail(expr: relax.Expr, lead: int) -> tuple[int, ...]:
    shape = sizes(expr)
    if shape is None or len(shape) < lead or None in shape[lead:]:
        raise NotLanes
    return tuple(shape[lead:])  # type: ignore[arg-type]


class LaneAlgebra:
    """Evaluates bindings in lanes of ``x``; whatever does not depend on x is a table.

    Parameters
    ----------
    graph : Graph
    x : relax.Var
        The rotated value; its last axis holds the lanes, the axes before stay in place.
    through_slices : bool
        Whether a sliced table counts as lanes of the whole one.

    Attributes
    ----------
    tails : dict of int to tuple of int
        By the hash of a table: the last dimensions that its lanes number.
    """

    def __init__(self, graph: Graph, x: relax.Var, through_slices: bool = False) -> None:
        self.graph, self.x, self.through_slices = graph, x, through_slices
        self.lead_dims = (dims(x) or [])[:-1]
        self.lead = len(self.lead_dims)
        self.depends: dict[relax.Var, bool] = {}
        self.done: dict[relax.Var, Lanes] = {}
        self.tails: dict[int, tuple[int, ...]] = {}

    def reads_x(self, expr: relax.Expr) -> bool:
        """Return whether a value is made from x by operators of the algebra."""
        if isinstance(expr, relax.Tuple):
            return any(self.reads_x(f) for f in expr.fields)
        if not isinstance(expr, relax.Var):
            return False
        if expr.same_as(self.x):
            return True
        if expr not in self.depends:
            if len(self.depends) > MOST_NODES:
                raise NotLanes
            self.depends[expr] = False
            value = self.graph.value.get(expr)
            if isinstance(value, relax.TupleGetItem):
                self.depends[expr] = self.reads_x(value.tuple_value)
            elif isinstance(value, relax.Call) and self.graph.op(expr) in OPERATORS:
                self.depends[expr] = any(self.reads_x(a) for a in value.args)
        return self.depends[expr]

    def _table(self, expr: relax.Expr, tail: tuple[int, ...]) -> Lanes:
        """Return a table's lanes, broadcast to the tail."""
        shape = sizes(expr)
        if not (isinstance(expr, relax.Var) or is_constant(expr)) or shape is None or not shape:
            raise NotLanes
        own = shape[-len(tail) :]
        if None in own or len(shape) > self.lead + len(tail):
            raise NotLanes
        leaf: relax.Expr = expr
        lanes = np.arange(int(np.prod(own))).reshape(own)  # type: ignore[arg-type]
        call = self.graph.call(expr, "relax.strided_slice")
        if self.through_slices and call is not None and len(tail) == 1:
            begin = _last_axis_slice(call)
            if begin is not None:
                leaf, lanes, own = call.args[0], begin, sizes(call.args[0])[-1:]  # type: ignore[index]
        if self.tails.setdefault(hash(leaf), tuple(own)) != tuple(own):  # type: ignore[arg-type]
            raise NotLanes
        try:
            lanes = np.broadcast_to(lanes, tail)
        except ValueError as error:
            raise NotLanes from error
        return [Term(np.ones(tail), ((leaf, lanes),))]

    def of(self, expr: relax.Expr) -> Lanes:
        """Return the terms of a value that reads x."""
        if not isinstance(expr, relax.Var) or not self.reads_x(expr):
            raise NotLanes
        if expr in self.done:
            return self.done[expr]
        shape = dims(expr)
        if shape is None or not same_dims(shape[: self.lead], self.lead_dims):
            raise NotLanes
        tail = _tail(expr, self.lead)
        if expr.same_as(self.x):
            out = [Term(np.ones(tail), ((self.x, np.arange(tail[0])),))]
        else:
            out = self._step(expr, tail)
            if len(out) > MOST_TERMS:
                raise NotLanes
        self.done[expr] = out
        return out

    def _step(self, expr: relax.Var, tail: tuple[int, ...]) -> Lanes:
        value, op = self.graph.value[expr], self.graph.op(expr)
        if isinstance(value, relax.TupleGetItem):
            return self._split(value)
        args = value.args
        if op == "relax.astype":
            if not only_rounds(value):
                raise NotLanes
            return self.of(args[0])
        if op == "relax.negative":
            return [replace(t, coefficient=-t.coefficient) for t in self.of(args[0])]
        if op in ("relax.reshape", "relax.expand_dims", "relax.squeeze"):
            return [t.map(lambda a: a.reshape(tail)) for t in self.of(args[0])]
        if op == "relax.strided_slice":
            return self._slice(value)
        if op == "relax.take":
            return self._take(value)
        if op in ("relax.concat", "relax.stack"):
            return self._join(value, op)
        if op in ("relax.add", "relax.subtract"):
            left, right = self.of(args[0]), self.of(args[1])
            if _tail(args[0], self.lead) != tail or _tail(args[1], self.lead) != tail:
                raise NotLanes
            sign = -1 if op == "relax.subtract" else 1
            return [*left, *(replace(t, coefficient=sign * t.coefficient) for t in right)]
        if op == "relax.multiply":
            return self._multiply(value, tail)
        raise NotLanes

    def _multiply(self, call: relax.Call, tail: tuple[int, ...]) -> Lanes:
        for part, factor in either(call):
            number = scalar(self.graph, factor)
            if number is not None:
                return [replace(t, coefficient=number * t.coefficient) for t in self.of(part)]
        for part, factor in either(call):
            if self.reads_x(part) and not self.reads_x(factor):
                if _tail(part, self.lead) != tail:
                    raise NotLanes
                terms = self.of(part)
                if any(len(t.factors) > 1 for t in terms):
                    raise NotLanes  # A lane of x times two tables is no rotation.
                (table,) = self._table(factor, tail)
                return [replace(t, factors=(*t.factors, *table.factors)) for t in terms]
        raise NotLanes

    def _axis(self, axis: int, rank: int) -> int:
        """Return an axis within the tail."""
        at = (axis + rank if axis < 0 else axis) - self.lead
        if at < 0:
            raise NotLanes
        return at

    def _split(self, item: relax.TupleGetItem) -> Lanes:
        call = self.graph.call(item.tuple_value, "relax.split")
        if call is None:
            raise NotLanes
        rank = len(dims(call.args[0]) or ())
        axis = self._axis(int(call.attrs.axis), rank)
        given = call.attrs.indices_or_sections
        cuts = int(given) if isinstance(given, (int, tirx.IntImm)) else [int(i) for i in given]
        size = _tail(call.args[0], self.lead)[axis]
        if isinstance(cuts, int):
            if size % cuts:
                raise NotLanes
        return [t.map(lambda a: np.split(a, cuts, axis)[item.index]) for t in self.of(call.args[0])]

    def _slice(self, call: relax.Call) -> Lanes:
        source = call.args[0]
        rank = len(dims(source) or ())
        where: list[slice] = [slice(None)] * (rank - self.lead)
        for axis, part in slices(call):
            where[self._axis(axis, rank)] = part
        return [t.map(lambda a: a[tuple(where)]) for t in self.of(source)]

    def _take(self, call: relax.Call) -> Lanes:
        """One lane of an axis of the tail, as ``x[..., 0]`` is imported."""
        number = scalar(self.graph, call.args[1])
        if call.attrs.axis is None or number is None or dims(call.args[1]):
            raise NotLanes
        rank = len(dims(call.args[0]) or ())
        axis = self._axis(int(call.attrs.axis), rank)
        if not 0 <= int(number) < _tail(call.args[0], self.lead)[axis]:
            raise NotLanes
        return [t.map(lambda a: a.take(int(number), axis)) for t in self.of(call.args[0])]

    def _join(self, call: relax.Call, op: str) -> Lanes:
        fields = fields_of(self.graph, call.args[0])
        if not fields or call.attrs.axis is None:
            raise NotLanes
        rank = len(dims(fields[0]) or ()) + (op == "relax.stack")
        axis = self._axis(int(call.attrs.axis), rank)
        out: Lanes = []
        tails = [_tail(f, self.lead) for f in fields]
        for at, field in enumerate(fields):
            for term in self.of(field):

                def place(a: np.ndarray, at: int = at) -> np.ndarray:
                    parts = [a if i == at else np.zeros(t, a.dtype) for i, t in enumerate(tails)]
                    return np.stack(parts, axis) if op == "relax.stack" else np.concatenate(parts, axis)

                out.append(term.map(place))
        return out


def slices(call: relax.Call) -> list[tuple[int, slice]]:
    """Return (axis, slice) of a strided slice with constant bounds."""
    operands = list(call.args[1:])
    if len(operands) < 3 or any(not isinstance(o, relax.Tuple) for o in operands):
        raise NotLanes
    rows = []
    for operand in operands:
        numbers = [_int(field) for field in operand.fields]
        rows.append(numbers)
    strides = rows[3] if len(rows) > 3 else [1] * len(rows[0])
    if any(s < 1 for s in strides) or any(b < 0 for b in (*rows[1],)):
        raise NotLanes
    return [(a, slice(b, e, s)) for a, b, e, s in zip(rows[0], rows[1], rows[2], strides)]


def _int(field: object) -> int:
    value = getattr(field, "value", field)
    if isinstance(value, (int, tirx.IntImm)):
        return int(value)
    raise NotLanes


def _last_axis_slice(call: relax.Call) -> np.ndarray | None:
    """Return the lanes that a slice of the last axis alone keeps."""
    shape = sizes(call.args[0])
    if shape is None or shape[-1] is None:
        return None
    try:
        cuts = slices(call)
    except NotLanes:
        return None
    if any(axis % len(shape) != len(shape) - 1 for axis, _ in cuts) or len(cuts) != 1:
        return None
    return np.arange(shape[-1])[cuts[0][1]]
