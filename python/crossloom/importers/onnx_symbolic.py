"""Shape arithmetic of an ONNX graph, done on integers and symbolic dimensions while importing.

Exporters spell shapes as tensors: ``Shape -> Gather -> Mul -> Concat -> Reshape``.  Each such tensor is kept
here as an array of integers and expressions of symbolic dimensions, so that a Reshape at its end knows its
shape; it becomes a tensor only where something else reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.sym import Analyzer

from crossloom.errors import UnsupportedModel

#: Larger integer tensors are data, not shapes.
MAX_ELEMENTS = 4096
_DTYPES = {7: "int64", 6: "int32", 9: "bool"}
_LIMIT = 1 << 48


class _Unknown(Exception):
    """The answer depends on a symbolic dimension in a way that is left to run time."""


@dataclass(frozen=True)
class Value:
    """An integer or boolean tensor known while importing.

    Attributes
    ----------
    items : numpy.ndarray of object
        Each is an int or an int64 ``PrimExpr``.
    dtype : str
        ``"int64"``, ``"int32"`` or ``"bool"``.
    """

    items: np.ndarray
    dtype: str = "int64"

    @staticmethod
    def of(array: np.ndarray) -> Value | None:
        """Return a constant as a value; None for other dtypes and for large tensors."""
        if array.dtype.name not in ("int64", "int32", "bool") or array.size > MAX_ELEMENTS:
            return None
        return Value(boxed([int(v) for v in array.reshape(-1)], array.shape), array.dtype.name)

    @property
    def constant(self) -> bool:
        return all(isinstance(v, int) for v in self.items.reshape(-1))

    def list(self) -> list[Any]:
        return list(self.items.reshape(-1))

    def tensor(self, bb: Any) -> Any:
        """Emit the value as a Relax tensor."""
        if self.constant:
            return relax.const(np.array(self.list(), self.dtype).reshape(self.items.shape), self.dtype)
        x = bb.emit(relax.op.shape_to_tensor(relax.ShapeExpr(self.list())))
        if self.items.ndim != 1:
            x = bb.emit(relax.op.reshape(x, list(self.items.shape)))
        return x if self.dtype == "int64" else bb.emit(relax.op.astype(x, self.dtype))


def boxed(values: list[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Return an object array; numpy alone would try to iterate over expressions."""
    out = np.empty(len(values), object)
    for i, value in enumerate(values):
        out[i] = value
    return out.reshape(shape)


class ShapeMath:
    """Evaluates operators on values; symbolic dimensions are taken to be at least 0 and below 2**48."""

    def __init__(self) -> None:
        self._analyzer = Analyzer()
        self._bound: set[Any] = set()

    def simplify(self, x: Any) -> Any:
        """Return x as an int where it is one, else simplified."""
        if isinstance(x, bool | int | np.integer):
            return int(x)
        if not isinstance(x, tirx.IntImm):
            self._bind(x)
            x = self._analyzer.simplify(x)
        return int(x.value) if isinstance(x, tirx.IntImm) else x

    def proves(self, condition: Any) -> bool:
        """Tell whether a condition holds for all sizes."""
        if isinstance(condition, bool | int):
            return bool(condition)
        self._bind(condition)
        return bool(self._analyzer.can_prove(condition))

    def _bind(self, x: Any) -> None:
        for var in tirx.analysis.undefined_vars(x):
            if var not in self._bound:
                self._bound.add(var)
                self._analyzer.bind(var, tvm.ir.Range(0, _LIMIT))

    def same(self, a: Any, b: Any) -> bool | None:
        """Tell whether two sizes are equal; None when that depends on the symbols."""
        if isinstance(a, int) and isinstance(b, int):
            return a == b
        difference = self.simplify(a - b)
        if isinstance(difference, int):
            return difference == 0
        if self.proves(difference > 0) or self.proves(difference < 0):
            return False
        return None

    def minimum(self, a: Any, b: Any) -> Any:
        return self._extreme(a, b, tirx.min, min)

    def maximum(self, a: Any, b: Any) -> Any:
        return self._extreme(a, b, tirx.max, max)

    def _extreme(self, a: Any, b: Any, symbolic: Callable[..., Any], plain: Callable[..., Any]) -> Any:
        if isinstance(a, int) and isinstance(b, int):
            return plain(a, b)
        return self.simplify(symbolic(_expr(a), _expr(b)))

    def divide(self, a: Any, b: Any) -> Any:
        """Integer division as ONNX means it, towards zero."""
        if isinstance(b, int) and b == 0:
            raise UnsupportedModel("division by zero in shape arithmetic", "correct the model")
        if isinstance(a, int) and isinstance(b, int):
            return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        if self.proves(_expr(a) >= 0) and self.proves(_expr(b) > 0):
            return self.simplify(tirx.floordiv(_expr(a), _expr(b)))
        return self.simplify(tirx.truncdiv(_expr(a), _expr(b)))

    def _modulo(self, a: Any, b: Any) -> Any:
        if isinstance(b, int) and b == 0:
            raise UnsupportedModel("modulo by zero in shape arithmetic", "correct the model")
        if isinstance(a, int) and isinstance(b, int):
            return a % b
        return self.simplify(tirx.floormod(_expr(a), _expr(b)))

    def _equal(self, a: Any, b: Any) -> Any:
        known = self.same(a, b)
        if known is None:
            raise _Unknown
        return int(known)

    def _less(self, a: Any, b: Any) -> Any:
        if isinstance(a, int) and isinstance(b, int):
            return int(a < b)
        if self.proves(_expr(a) < _expr(b)):
            return 1
        if self.proves(_expr(a) >= _expr(b)):
            return 0
        raise _Unknown

    def _elementwise(self, fn: Callable[..., Any], *parts: np.ndarray) -> np.ndarray:
        wide = np.broadcast_arrays(*parts)
        if wide[0].size > MAX_ELEMENTS:
            raise _Unknown
        rows = zip(*(w.reshape(-1) for w in wide))
        return boxed([self.simplify(fn(*row)) for row in rows], wide[0].shape)

    def evaluate(self, op_type: str, opset: int, inputs: list[Value | None], attrs: dict[str, Any]) -> Value | None:
        """Return the result of one standard operator, or None when it is not shape arithmetic."""
        method = _EVALUATORS.get(op_type)
        if method is None or not inputs or inputs[0] is None:
            return None
        try:
            out = method(self, inputs, attrs, opset)
        except _Unknown:
            return None
        if out is None or out.items.size > MAX_ELEMENTS:
            return None
        bits = {"int64": 64, "int32": 32}.get(out.dtype)
        if bits is None:
            return out
        half = 1 << (bits - 1)
        wrap = lambda v: (v + half) % (2 * half) - half if isinstance(v, int) else v
        return Value(boxed([wrap(v) for v in out.list()], out.items.shape), out.dtype)


def _expr(x: Any) -> Any:
    return tirx.IntImm("int64", x) if isinstance(x, int) else x


Inputs = list[Value | None]
Evaluator = Callable[[ShapeMath, Inputs, dict[str, Any], int], Value | None]


def _binary(name: str, result: str = "") -> Evaluator:
    def run(m: ShapeMath, inputs: Inputs, attrs: dict[str, Any], opset: int) -> Value | None:
        if any(v is None or (v.dtype == "bool" and result != "bool") for v in inputs):
            return None
        known = [v for v in inputs if v is not None]
        if name == "modulo" and attrs.get("fmod", 0):
            return None
        fn = {
            "add": lambda a, b: a + b,
            "subtract": lambda a, b: a - b,
            "multiply": lambda a, b: a * b,
            "divide": m.divide,
            "modulo": m._modulo,
            "min": m.minimum,
            "max": m.maximum,
            "equal": m._equal,
            "less": m._less,
            "greater": lambda a, b: m._less(b, a),
            "less_equal": lambda a, b: 1 - m._less(b, a),
            "greater_equal": lambda a, b: 1 - m._less(a, b),
            "and": lambda a, b: int(bool(a) and bool(b)),
            "or": lambda a, b: int(bool(a) or bool(b)),
        }[name]
        items = known[0].items
        for other in known[1:]:
            items = m._elementwise(fn, items, other.items)
        return Value(items, result or known[0].dtype)

    return run


def _ints(inputs: Inputs, index: int, attrs: dict[str, Any], name: str) -> list[int] | None:
    """Return operand `index`, or where it is absent the attribute of older operator sets."""
    if index < len(inputs):
        value = inputs[index]
        if value is None or not value.constant:
            raise _Unknown
        return value.list()
    return list(attrs[name]) if name in attrs else None


def _concat(m: ShapeMath, inputs: Inputs, attrs: dict[str, Any], opset: int) -> Value | None:
    known = [v for v in inputs if v is not None]
    if len(known) != len(inputs):
        return None
    return Value(np.concatenate([v.items for v in known], int(attrs.get("axis", 0))), known[0].dtype)


def _gather(m: ShapeMath, inputs: Inputs, attrs: dict[str, Any], opset: int) -> Value | None:
    data, indices = inputs[0], inputs[1]
    if data is None or indices is None or not indices.constant:
        return None
    where = indices.items.astype("int64")
    return Value(_array(data.items.take(where, axis=int(attrs.get("axis", 0)))), data.dtype)


def _array(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else boxed([x], ())


def _unsqueeze(m: ShapeMath, inputs: Inputs, attrs: dict[str, Any], opset: int) -> Value | None:
    data, axes = inputs[0], _ints(inputs, 1, attrs, "axes")
    assert data is not None
    return None if axes is None else Value(np.expand_dims(data.items, tuple(axes)), data.dtype)


def _squeeze(m: ShapeMath, inputs: Inputs, attrs: dict[str, Any], opset: int) -> Value | None:
    data, axes = inputs[0], _ints(inputs, 1, attrs, "axes")
    assert data is not None
    return Value(_array(np.squeeze(data.items, None if axes is None else tuple(axes))), data.dtype)


def _reshape(m: ShapeMath, inputs: Inputs, attrs: dict[str, Any], opset: int) -> Value | None:
    data, shape = inputs[0], _ints(inputs, 1, attrs, "shape")
    assert data is not None
    if shape is None:
        return None
    if not attrs.get("allowzero", 0):
        shape = [data.items.shape[i] if d == 0 else d for i, d in enumerate(shape)]
    return Value(data.items.reshape(shape), data.dtype)


def _cast(m: ShapeMath, inputs: Inputs, attrs: dict[str, Any], opset: int) -> Value | None:
    data, target = inputs[0], _DTYPES.get(attrs.get("to", 0))
    assert data is not None
    if target is None or (target == "bool" and not data.constant):
        return None
    return Value(m._elementwise(lambda v: int(bool(v)) if target == "bool" else v, data.items), target)


def _where(m: ShapeMath, inputs: Inputs, attrs: dict[str, Any], opset: int) -> Value | None:
    condition, a, b = inputs
    if condition is None or a is None or b is None:
        return None
    pick = lambda c, x, y: x if c else y
    return Value(m._elementwise(pick, condition.items, a.items, b.items), a.dtype)


def _slice(m: ShapeMath, inputs: Inputs, attrs: dict[str, Any], opset: int) -> Value | None:
    data = inputs[0]
    assert data is not None
    starts, ends = _ints(inputs, 1, attrs, "starts"), _ints(inputs, 2, attrs, "ends")
    axes = _ints(inputs, 3, attrs, "axes") if len(inputs) <= 3 or inputs[3] else None
    steps = _ints(inputs, 4, attrs, "steps") if len(inputs) > 4 else None
    if starts is None or ends is None:
        return None
    index: list[Any] = [slice(None)] * data.items.ndim
    for i, axis in enumerate(axes if axes is not None else range(len(starts))):
        step = steps[i] if steps else 1
        # numpy reads -1 as an end counted from the back; ONNX clamps what lies before the first element.
        size = data.items.shape[axis]
        end = ends[i] + size if ends[i] < 0 else ends[i]
        index[axis] = slice(starts[i], end if end >= 0 else (None if step < 0 else 0), step)
    return Value(data.items[tuple(index)], data.dtype)


def _product(m: ShapeMath, inputs: Inputs, attrs: dict[str, Any], opset: int) -> Value | None:
    data, axes = inputs[0], _ints(inputs, 1, attrs, "axes")
    assert data is not None
    if data.dtype == "bool" or (axes is not None and len(axes) != 1) or data.items.ndim != 1:
        return None
    total: Any = 1
    for item in data.list():
        total = m.simplify(total * item)
    return Value(boxed([total], (1,) if attrs.get("keepdims", 1) else ()), data.dtype)


def _range(m: ShapeMath, inputs: Inputs, attrs: dict[str, Any], opset: int) -> Value | None:
    if any(v is None or not v.constant for v in inputs) or len(inputs) != 3:
        return None
    start, limit, step = (v.list()[0] for v in inputs if v is not None)
    if step == 0:
        raise UnsupportedModel("Range with step 0", "correct the step")
    numbers = range(start, limit, step)
    assert inputs[0] is not None
    return Value(boxed(list(numbers), (len(numbers),)), inputs[0].dtype) if len(numbers) <= MAX_ELEMENTS else None


def _unary(fn: Callable[[Any], Any], boolean: bool = False) -> Evaluator:
    def run(m: ShapeMath, inputs: Inputs, attrs: dict[str, Any], opset: int) -> Value | None:
        data = inputs[0]
        assert data is not None
        if (data.dtype == "bool") != boolean and fn is not _identity:
            return None
        return Value(m._elementwise(fn, data.items), data.dtype)

    return run


def _identity(x: Any) -> Any:
    return x


_EVALUATORS: dict[str, Evaluator] = {
    "Add": _binary("add"),
    "Sub": _binary("subtract"),
    "Mul": _binary("multiply"),
    "Div": _binary("divide"),
    "Mod": _binary("modulo"),
    "Min": _binary("min"),
    "Max": _binary("max"),
    "Equal": _binary("equal", "bool"),
    "Less": _binary("less", "bool"),
    "Greater": _binary("greater", "bool"),
    "LessOrEqual": _binary("less_equal", "bool"),
    "GreaterOrEqual": _binary("greater_equal", "bool"),
    "And": _binary("and", "bool"),
    "Or": _binary("or", "bool"),
    "Not": _unary(lambda v: 1 - v, boolean=True),
    "Neg": _unary(lambda v: -v),
    "Identity": _unary(_identity),
    "Concat": _concat,
    "Gather": _gather,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Reshape": _reshape,
    "Cast": _cast,
    "Where": _where,
    "Slice": _slice,
    "ReduceProd": _product,
    "Range": _range,
}
