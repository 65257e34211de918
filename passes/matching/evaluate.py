"""Evaluate index arithmetic in the algebra of ``lines``.

Ranges, comparisons, ``tril``/``triu``, ``where``, casts, views and arithmetic are known, constants included;
lengths may be symbolic.  Anything else has no value.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from tvm import relax, tirx
from tvm_ffi import structural_equal

from crossloom.rewrite import Graph

from .line_tables import of_array
from .line_views import gathered, inserted, joined, move, narrow, sliced
from .lines import Line, Offset, Steps, Value, as_line, combine, parted, proved, reach, settled, uniform
from .spelling import dims, dtype, is_constant, number, sizes

#: More lines than a mask of any exporter has.
MOST_LINES = 200
#: By function: what its constants are, by their hash; layers share a few large ones.
_CONSTANTS: weakref.WeakKeyDictionary[Graph, dict[int, Value | None]] = weakref.WeakKeyDictionary()

_COMPARE: dict[str, tuple[int, int]] = {
    # a OP b as factor * (a - b) + shift >= 0, over integers
    "relax.greater_equal": (1, 0),
    "relax.greater": (1, -1),
    "relax.less_equal": (-1, 0),
    "relax.less": (-1, -1),
}
#: ``abs(a) OP b`` is ``a OP b and a MIRRORED -b``.
_MIRRORED = {"relax.less": "relax.greater", "relax.less_equal": "relax.greater_equal"}
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
            value = settled(narrow(value, sizes(expr)), _shape(expr))
        if isinstance(expr, relax.Var):
            self.known[expr] = value
        return value

    def _call(self, call: relax.Call) -> Value | None:
        name = call.op.name
        if name == "relax.arange":
            start, _, step = (number(a) for a in call.args)
            return Line((int(step),), start) if dtype(call).startswith("int") else None
        if name in ("relax.zeros", "relax.ones", "relax.zeros_like", "relax.ones_like"):
            return Steps((float("ones" in name),))
        if name in ("relax.full", "relax.full_like"):
            return self.at(call.args[1])
        if name in ("relax.tril", "relax.triu"):
            return self._triangle(call, name == "relax.tril")
        if name == "relax.shape_to_tensor":
            (size,) = call.args[0].values
            return Line((), number(size))
        if name == "relax.concat":
            return self._concat(call)
        if name == "relax.index_tensor":
            return self._gather(call)
        if name in _MIRRORED and (size := self.graph.call(call.args[0], "relax.abs")) is not None:
            return self._within(call, size.args[0])
        if (value := self.at(call.args[0])) is None:
            return None
        if name == "relax.cumsum":
            return value if uniform(value) == 0.0 else None
        if name == "relax.astype":
            return _cast(value, dtype(call))
        if (moved := self.view(call, name, value)) is not None:
            return moved
        if name == "relax.bitwise_not" and dtype(call) == "bool":
            name = "relax.logical_not"
        values = [value, *(self.at(a) for a in call.args[1:])]
        return _apply(name, [v for v in values if v is not None], _shape(call)) if None not in values else None

    def _concat(self, call: relax.Call) -> Value | None:
        parts = _fields(self.graph, call.args[0])
        values, rank = [self.at(part) for part in parts], len(dims(call) or ())
        axis = int(call.attrs.axis) % rank
        known = [v for v in values if v is not None]
        return joined(known, [_shape(p)[axis] for p in parts], axis, rank) if len(known) == len(parts) else None

    def _gather(self, call: relax.Call) -> Value | None:
        data, indices = call.args[0], _fields(self.graph, call.args[1])
        lines = [None if (v := self.at(index)) is None else as_line(v) for index in indices]
        known, shapes = [line for line in lines if line is not None], [_shape(index) for index in indices]
        if len(known) < len(lines) or len(lines) != len(_shape(data)):
            return None
        if (joined := self.graph.call(data, "relax.concat")) is not None:
            # What is appended for an index out of bounds is not read where none is.
            axis, first = int(joined.attrs.axis) % len(lines), _fields(self.graph, joined.args[0])[0]
            if proved(reach(known[axis], shapes[axis])[1] < _shape(first)[axis]):
                data = first
        value = self.at(data)
        return None if value is None else gathered(value, known, shapes)

    def _within(self, call: relax.Call, inner: relax.Expr) -> Value | None:
        """Return whether the absolute value of a line is below a bound: two lines bound it."""
        line, bound = self.at(inner), self.at(call.args[1])
        if not isinstance(line, Line) or bound is None or (level := as_line(bound)) is None:
            return None
        name, shape = call.op.name, _shape(call)
        sides = [_of_lines(name, line, level, shape), _of_lines(_MIRRORED[name], line, level.times(-1), shape)]
        return combine(_ELEMENTWISE["relax.logical_and"], [side for side in sides if isinstance(side, Steps)])

    def _triangle(self, call: relax.Call, lower: bool) -> Value | None:
        value, rank = self.at(call.args[0]), len(dims(call) or ())
        if not isinstance(value, Steps):
            return None
        sign = 1 if lower else -1
        line = Line((*(0,) * (rank - 2), sign, -sign), sign * number(call.args[1]))
        return combine(lambda inside, x: x if inside else 0.0, [parted(1.0, 0.0, line), value])

    def view(self, call: relax.Call, name: str, value: Value) -> Value | None:
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
            return value if isinstance(value, Steps) and not value.lines else None
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
        return combine(lambda x: float(bool(x)), [value])
    kind = np.dtype("float32" if to == "bfloat16" else to)
    if kind.kind in "iu" and not np.isfinite(value.values).all():
        return None
    return combine(lambda x: float(np.asarray(x).astype(kind)), [value])


def _apply(name: str, values: list[Value], shape: Sequence[Offset]) -> Value | None:
    """Return an elementwise operator of values, over a tensor of a shape."""
    if name == "relax.where" and (chosen := uniform(values[0])) is not None:
        return values[1 if chosen else 2]
    if any(isinstance(v, Line) and uniform(v) is None for v in values):
        lines = [as_line(v) for v in values]
        if len(lines) != 2 or lines[0] is None or lines[1] is None:
            return None
        return _of_lines(name, lines[0], lines[1], shape)
    numbers = [v if isinstance(v, Steps) else Steps((float(int(v.offset)),)) for v in values]
    return combine(_ELEMENTWISE[name], numbers) if name in _ELEMENTWISE else None


def _of_lines(name: str, left: Line, right: Line, shape: Sequence[Offset]) -> Value | None:
    """Return an elementwise operator of two lines."""
    difference = left.plus(right.times(-1))
    if name in _COMPARE:
        factor, shift = _COMPARE[name]
        line = difference.times(factor)
        return parted(1.0, 0.0, replace(line, offset=line.offset + shift))
    if name in ("relax.minimum", "relax.maximum"):
        low, high = reach(difference, shape)
        less, more = (left, right) if proved(high <= 0) else (right, left) if proved(low >= 0) else (None, None)
        return less if name == "relax.minimum" else more
    if name == "relax.add":
        return left.plus(right)
    return difference if name == "relax.subtract" else None


def _shape(expr: relax.Expr) -> list[Offset]:
    """Return a tensor's sizes, plain where they are static."""
    return [number(d) for d in dims(expr) or ()]
