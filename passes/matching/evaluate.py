"""Evaluate index arithmetic in the algebra of ``lines``.

Ranges, comparisons, ``tril``/``triu``, ``where``, casts, views and arithmetic are known, constants included;
lengths may be symbolic.  Anything else has no value.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from tvm import relax, tirx
from tvm_ffi import structural_equal

from crossloom.rewrite import Graph

from .line_views import inserted, move, narrow, number, sliced
from .lines import Line, Split, Value, combine, of_array, uniform
from .spelling import dims, dtype, is_constant, sizes

#: More lines than a mask of any exporter has.
MOST_LINES = 80
#: By function: what its constants are, by their hash; layers share a few large ones.
_CONSTANTS: weakref.WeakKeyDictionary[Graph, dict[int, Value | None]] = weakref.WeakKeyDictionary()

_COMPARE: dict[str, tuple[int, int]] = {
    # a OP b as factor * (a - b) + shift >= 0, over integers
    "relax.greater_equal": (1, 0),
    "relax.greater": (1, -1),
    "relax.less_equal": (-1, 0),
    "relax.less": (-1, -1),
}
_ELEMENTWISE: dict[str, Callable[..., float]] = {
    "relax.add": operator.add,
    "relax.subtract": operator.sub,
    "relax.multiply": operator.mul,
    "relax.minimum": min,
    "relax.maximum": max,
    "relax.negative": operator.neg,
    "relax.logical_and": lambda a, b: float(bool(a) and bool(b)),
    "relax.logical_or": lambda a, b: float(bool(a) or bool(b)),
    "relax.logical_not": lambda a: float(not a),
    "relax.bitwise_and": lambda a, b: float(int(a) & int(b)),
    "relax.bitwise_or": lambda a, b: float(int(a) | int(b)),
    "relax.equal": lambda a, b: float(a == b),
    "relax.not_equal": lambda a, b: float(a != b),
    "relax.greater_equal": lambda a, b: float(a >= b),
    "relax.greater": lambda a, b: float(a > b),
    "relax.less_equal": lambda a, b: float(a <= b),
    "relax.less": lambda a, b: float(a < b),
    "relax.where": lambda c, a, b: a if c else b,
}


class Evaluator:
    """Evaluates values of one graph, each once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.known: dict[relax.Var, Value | None] = {}
        self.constants = _CONSTANTS.setdefault(graph, {})

    def at(self, expr: relax.Expr) -> Value | None:
        """Return the value of an expression, None where the algebra has none for it."""
        if isinstance(expr, relax.Var) and expr in self.known:
            return self.known[expr]
        if len(self.known) > MOST_LINES:
            return None
        value: Value | None = None
        resolved = self.graph.resolve(expr)
        if is_constant(resolved):
            key = hash(resolved)
            if key not in self.constants:
                self.constants[key] = of_array(np.asarray(resolved.value.numpy()))
            value = self.constants[key]
        elif self.graph.op(expr):
            try:
                value = self._call(resolved)
            except (TypeError, ValueError, IndexError):  # a symbolic number where the algebra needs a plain one
                value = None
        if value is not None:
            value = narrow(value, sizes(expr))
        if isinstance(expr, relax.Var):
            self.known[expr] = value
        return value

    def _call(self, call: relax.Call) -> Value | None:
        name = call.op.name
        if name == "relax.arange":
            start, _, step = (number(a) for a in call.args)
            return Line((int(step),), start) if dtype(call).startswith("int") else None
        if name in ("relax.zeros", "relax.ones", "relax.zeros_like", "relax.ones_like"):
            return Split(float("ones" in name))
        if name in ("relax.full", "relax.full_like"):
            return self.at(call.args[1])
        if name in ("relax.tril", "relax.triu"):
            return self._triangle(call, name == "relax.tril")
        if (value := self.at(call.args[0])) is None:
            return None
        if name == "relax.astype":
            return _cast(value, dtype(call))
        if (moved := self._view(call, name, value)) is not None:
            return moved
        if name == "relax.bitwise_not" and dtype(call) == "bool":
            name = "relax.logical_not"
        values = [value, *(self.at(a) for a in call.args[1:])]
        return _apply(name, [v for v in values if v is not None]) if None not in values else None

    def _triangle(self, call: relax.Call, lower: bool) -> Value | None:
        value, rank = self.at(call.args[0]), len(dims(call) or ())
        if not isinstance(value, Split):
            return None
        sign = 1 if lower else -1
        line = Line((*(0,) * (rank - 2), sign, -sign), sign * number(call.args[1]))
        return combine(lambda inside, x: x if inside else 0.0, [Split(1.0, 0.0, line), value])

    def _view(self, call: relax.Call, name: str, value: Value) -> Value | None:
        """Return the value over the axes a view has."""
        attrs = call.attrs
        if name == "relax.broadcast_to":
            return value
        if name == "relax.strided_slice":
            return sliced(value, *(_fields(self.graph, a) for a in call.args[1:]), rank=len(dims(call) or ()))
        rank = len(dims(call.args[0]) or ())
        if name == "relax.permute_dims":
            axes = [int(a) % rank for a in attrs.axes] if attrs.axes is not None else list(range(rank))[::-1]
            return move(value, lambda s: [s[a] for a in axes], rank)
        if name == "relax.expand_dims":
            places = sorted(int(a) % (rank + len(attrs.axis)) for a in attrs.axis)
            return move(value, lambda s: inserted(s, places), rank)
        if name in ("relax.reshape", "relax.squeeze"):
            return self._without_ones(call, value, rank)
        return None

    def _without_ones(self, call: relax.Call, value: Value, rank: int) -> Value | None:
        """Return the value behind a reshape that adds or drops axes of size 1."""
        before, after = dims(call.args[0]) or [], dims(call) or []
        one = [isinstance(d, tirx.IntImm) and int(d) == 1 for d in before]
        wide = [a for a in range(rank) if not one[a]]
        places = [a for a, d in enumerate(after) if not (isinstance(d, tirx.IntImm) and int(d) == 1)]
        if len(wide) != len(places) or not all(structural_equal(before[a], after[b]) for a, b in zip(wide, places)):
            return value if isinstance(value, Split) and value.line is None else None
        source = dict(zip(places, wide))
        return move(value, lambda s: [s[source[a]] if a in source else 0 for a in range(len(after))], rank)


def _fields(graph: Graph, expr: relax.Expr) -> list[relax.Expr]:
    value = graph.resolve(expr)
    if not isinstance(value, relax.Tuple):
        raise ValueError("operands of a slice that are not written out")
    return list(value.fields)


def _cast(value: Value, to: str) -> Value | None:
    if isinstance(value, Line):
        # Whole numbers below 2^24 survive float32; float16 ends at 2^11.
        return value if to in ("int64", "int32", "float32", "float64") else None
    if to == "bool":
        return replace(value, hit=float(bool(value.hit)), miss=float(bool(value.miss)))
    kind = np.dtype("float32" if to == "bfloat16" else to)
    if kind.kind in "iu" and not np.isfinite([value.hit, value.miss]).all():
        return None
    with np.errstate(all="ignore"):
        hit, miss = (float(np.asarray(x).astype(kind)) for x in (value.hit, value.miss))
    return replace(value, hit=hit, miss=miss)


def _as_line(value: Value) -> Line | None:
    if isinstance(value, Line):
        return value
    number = uniform(value)
    return Line((), int(number)) if number is not None and number.is_integer() else None


def _apply(name: str, values: list[Value]) -> Value | None:
    """Return an elementwise operator of values."""
    if any(isinstance(v, Line) and uniform(v) is None for v in values):
        if len(values) != 2:
            return None
        left, right = (_as_line(v) for v in values)
        if left is None or right is None:
            return None
        if name in _COMPARE:
            factor, shift = _COMPARE[name]
            line = left.plus(right.times(-1)).times(factor)
            return Split(1.0, 0.0, replace(line, offset=line.offset + shift))
        if name == "relax.add":
            return left.plus(right)
        return left.plus(right.times(-1)) if name == "relax.subtract" else None
    numbers = [v if isinstance(v, Split) else Split(float(int(v.offset))) for v in values]
    return combine(_ELEMENTWISE[name], numbers) if name in _ELEMENTWISE else None
