"""What one element of a table is, followed through the operators that make the table, whichever they are.

An element is asked for by its place: lanes as numbers, tokens as free axes.  Operators that move elements are
undone, arithmetic becomes products of factors; whatever is not understood stays a leaf, element by element, which
is always right and merely says less.  Casts to wider types are looked through; casts to narrower ones are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import relax

from crossloom.rewrite import Graph

from .lanes import NotLanes
from .moves import Index, Place, affine
from .products import Factors, Product, numbers
from .spelling import dims, dtype, fields_of, is_constant, is_weight, sizes
from .undo import MOVES, Unknown, axis_of, plain

#: Operators followed below one element; a rotary table takes about twenty.
_DEEPEST = 80

_UNARY = {
    "relax.cos": np.cos,
    "relax.sin": np.sin,
    "relax.exp": np.exp,
    "relax.log": np.log,
    "relax.sqrt": np.sqrt,
    "relax.rsqrt": lambda a: 1.0 / np.sqrt(a),
    "relax.floor": np.floor,
    "relax.abs": np.abs,
}
_BINARY = {
    "relax.power": np.power,
    "relax.floor_divide": np.floor_divide,
    "relax.floor_mod": np.mod,
    "relax.mod": np.fmod,
    "relax.minimum": np.minimum,
    "relax.maximum": np.maximum,
    "relax.equal": np.equal,
    "relax.not_equal": np.not_equal,
    "relax.less": np.less,
    "relax.less_equal": np.less_equal,
    "relax.greater": np.greater,
    "relax.greater_equal": np.greater_equal,
    "relax.logical_and": np.logical_and,
    "relax.logical_or": np.logical_or,
}
_WIDTH = {"bool": 1, "float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}


class Elements:
    """Evaluates single elements of a function's values.

    Parameters
    ----------
    graph : Graph
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.factors = graph, Factors()
        self.done: dict[tuple[int, Index], Product] = {}
        self.arrays: dict[int, np.ndarray] = {}
        self.depth = 0

    def of(self, expr: relax.Expr, index: Index) -> Product:
        """Return the element of ``expr`` at a place (one entry an axis)."""
        while isinstance(expr, relax.Var) and isinstance(self.graph.value.get(expr), relax.Var):
            expr = self.graph.value[expr]
        shape = dims(expr)
        if shape is None or len(shape) != len(index):
            return self._leaf(expr, index)
        known = sizes(expr) or []
        index = tuple(0 if size == 1 else place for size, place in zip(known, index))
        key = hash(expr), index
        if key not in self.done:
            self.depth += 1
            try:
                found = self._step(expr, index) if self.depth <= _DEEPEST else None
            except (Unknown, NotLanes):
                found = None
            self.depth -= 1
            self.done[key] = found if found is not None else self._leaf(expr, index)
        return self.done[key]

    def _leaf(self, expr: relax.Expr, index: Index) -> Product:
        return self.factors.leaf(hash(expr), index, not is_weight(self.graph, expr))

    def _step(self, expr: relax.Expr, index: Index) -> Product | None:
        value, op = self.graph.resolve(expr), self.graph.op(expr)
        if is_constant(value):
            if hash(value) not in self.arrays:
                self.arrays[hash(value)] = value.value.numpy()
            return self.factors.constant(self.arrays[hash(value)], index)
        if isinstance(value, relax.TupleGetItem):
            return self._item(value, index)
        if op in MOVES:
            at = MOVES[op](self, value, index)
            return None if at is None else self.of(*at)
        if not op:
            return None
        out = self._arithmetic(op, value, index)
        if out is None or out.factors or dtype(expr) in ("", "bfloat16"):
            return out
        with np.errstate(over="ignore", invalid="ignore"):
            return Product(float(np.asarray(out.number).astype(dtype(expr))))

    def _each(self, operands: Sequence[relax.Expr], index: Index) -> list[Product]:
        """Return the elements of operands that are broadcast to a common shape."""
        out = []
        for operand in operands:
            rank = len(dims(operand) or ())
            if dims(operand) is None or rank > len(index):
                raise Unknown
            out.append(self.of(operand, index[len(index) - rank :]))
        return out

    def _arithmetic(self, op: str, call: relax.Call, index: Index) -> Product | None:
        f = self.factors
        if op in ("relax.zeros", "relax.ones"):
            return Product(float(op == "relax.ones"))
        if op == "relax.full":
            return self.of(call.args[1], ())
        if op == "relax.arange":
            begin, step = plain(call.args[0]), plain(call.args[2])
            return f.plus(Product(begin), f.times(Product(step), f.place(index[0])))
        if op in ("relax.matmul", "relax.outer", "relax.einsum"):
            return self._outer(op, call, index)
        if op == "relax.astype":
            (a,) = self._each(call.args, index)
            return a if not a.factors or _widens(dtype(call.args[0]), dtype(call)) else f.apply(dtype(call), a)
        if op == "relax.negative":
            (a,) = self._each(call.args, index)
            return Product(-a.number, a.factors)
        if op == "relax.divide" and dtype(call).startswith(("int", "uint")):
            # Rounds towards zero, so that it is no product.
            args = self._each(call.args, index)
            values = numbers(args)
            if values is None:
                return f.apply("divide", *args)
            return Product(float(int(values[0] / values[1]))) if values[1] else None
        if op in _UNARY or op in _BINARY or op in _FIELD or op == "relax.where":
            return self._pointwise(op, self._each(call.args, index))
        return None

    def _pointwise(self, op: str, args: list[Product]) -> Product | None:
        f = self.factors
        if op == "relax.multiply":
            return f.times(*args)
        if op == "relax.divide":
            over = f.inverse(args[1])
            return None if over is None else f.times(args[0], over)
        if op == "relax.add":
            return f.plus(*args)
        if op == "relax.subtract":
            return f.plus(args[0], Product(-args[1].number, args[1].factors))
        if op == "relax.where":
            chosen = numbers(args[:1])
            if chosen is not None:
                return args[1] if chosen[0] else args[2]
            return args[1] if args[1] == args[2] else f.apply("where", *args)
        values = numbers(args)
        if values is None:
            return f.apply(op.removeprefix("relax."), *args)
        with np.errstate(all="ignore"):
            number = float((_UNARY.get(op) or _BINARY[op])(*values))  # type: ignore[operator]
        return Product(number) if np.isfinite(number) else None

    def _outer(self, op: str, call: relax.Call, index: Index) -> Product | None:
        """Products without a sum: contracted axes of size one, or none."""
        if op == "relax.outer":
            return self.factors.times(self.of(call.args[0], index[:1]), self.of(call.args[1], index[1:]))
        if op == "relax.einsum":
            fields = fields_of(self.graph, call.args[0])
            # Without an arrow the result's letters are implied, and none says which axis an index is of.
            left, _, right = str(call.attrs.subscripts).replace(" ", "").partition("->")
            names = left.split(",")
            if not fields or "." in left or set(left) - {","} != set(right) or len(set(right)) != len(right):
                return None
            at = dict(zip(right, index))
            out = Product(1.0)
            for field, letters in zip(fields, names):
                out = self.factors.times(out, self.of(field, tuple(at[c] for c in letters)))
            return out
        a, b = call.args
        if len(dims(a) or ()) < 2 or len(dims(b) or ()) < 2 or (sizes(a) or [0])[-1] != 1:
            return None
        (left_,) = self._each([a], (*index[:-1], 0))
        (right_,) = self._each([b], (*index[:-2], 0, index[-1]))
        return self.factors.times(left_, right_)

    def _item(self, item: relax.TupleGetItem, index: Index) -> Product | None:
        call = self.graph.call(item.tuple_value, "relax.split", "relax.meshgrid")
        if call is None:
            return None
        if self.graph.op(call) == "relax.meshgrid":
            fields = fields_of(self.graph, call.args[0])
            if not fields or str(call.attrs.indexing) != "ij":
                return None
            return self.of(fields[item.index], (index[item.index],))
        axis = axis_of(int(call.attrs.axis), len(index))
        given = call.attrs.indices_or_sections
        if hasattr(given, "__len__"):
            begin = [0, *(int(i) for i in given)][item.index]
        else:
            size = (sizes(call.args[0]) or [None])[axis]
            if size is None or size % int(given):
                return None
            begin = size // int(given) * item.index
        return self.of(call.args[0], (*index[:axis], affine(index[axis], begin, 1), *index[axis + 1 :]))

    def place(self, indices: relax.Expr, index: Index) -> Place:
        """Return the place that an element of an index tensor names."""
        value = self.of(indices, index)
        if value.factors:
            return ("value", value)
        if value.number < 0 or value.number != int(value.number):
            raise Unknown
        return int(value.number)


_FIELD = frozenset({"relax.multiply", "relax.divide", "relax.add", "relax.subtract"})


def _widens(old: str, new: str) -> bool:
    """Return whether a cast keeps every value (of integers: those a float32 position can be)."""
    if new.startswith(("int", "uint")):
        return old == "bool" or old.startswith(("int", "uint"))
    return new in _WIDTH and _WIDTH.get(old, 24) <= _WIDTH[new]
