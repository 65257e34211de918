"""Evaluate ONNX operators on known integers and symbolic sizes: the shape arithmetic of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from crossloom.errors import UnsupportedModel
from crossloom.importers.onnx_symbolic import MAX_ELEMENTS, ShapeMath, Unknown, Value, boxed

_DTYPES = {7: "int64", 6: "int32", 9: "bool"}
Inputs = list[Value | None]
Evaluator = Callable[[ShapeMath, Inputs, dict[str, Any]], Value | None]


def _binary(name: str, result: str = "") -> Evaluator:
    def run(m: ShapeMath, inputs: Inputs, attrs: dict[str, Any]) -> Value | None:
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
            "modulo": m.modulo,
            "min": m.minimum,
            "max": m.maximum,
            "equal": m.equal,
            "less": m.less,
            "greater": lambda a, b: m.less(b, a),
            "less_equal": lambda a, b: 1 - m.less(b, a),
            "greater_equal": lambda a, b: 1 - m.less(a, b),
            "and": lambda a, b: int(bool(a) and bool(b)),
            "or": lambda a, b: int(bool(a) or bool(b)),
        }[name]
        items = known[0].items
        for other in known[1:]:
            items = m.elementwise(fn, items, other.items)
        return Value(items, result or known[0].dtype)

    return run


def _ints(inputs: Inputs, index: int, attrs: dict[str, Any], name: str) -> list[int] | None:
    """Return operand `index`, or where it is absent the attribute of older operator sets."""
    if index < len(inputs):
        value = inputs[index]
        if value is None or not value.constant:
            raise Unknown
        return value.list()
    return list(attrs[name]) if name in attrs else None


def _concat(m: ShapeMath, inputs: Inputs, attrs: dict[str, Any]) -> Value | None:
    known = [v for v in inputs if v is not None]
    if len(known) != len(inputs):
        return None
    return Value(np.concatenate([v.items for v in known], int(attrs.get("axis", 0))), known[0].dtype)


def _gather(m: ShapeMath, inputs: Inputs, attrs: dict[str, Any]) -> Value | None:
    data, indices = inputs[0], inputs[1]
    if data is None or indices is None or not indices.constant:
        return None
    where = indices.items.astype("int64")
    return Value(_array(data.items.take(where, axis=int(attrs.get("axis", 0)))), data.dtype)


def _array(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else boxed([x], ())


def _unsqueeze(m: ShapeMath, inputs: Inputs, attrs: dict[str, Any]) -> Value | None:
    data, axes = inputs[0], _ints(inputs, 1, attrs, "axes")
    assert data is not None
    return None if axes is None else Value(np.expand_dims(data.items, tuple(axes)), data.dtype)


def _squeeze(m: ShapeMath, inputs: Inputs, attrs: dict[str, Any]) -> Value | None:
    data, axes = inputs[0], _ints(inputs, 1, attrs, "axes")
    assert data is not None
    return Value(_array(np.squeeze(data.items, None if axes is None else tuple(axes))), data.dtype)


def _reshape(m: ShapeMath, inputs: Inputs, attrs: dict[str, Any]) -> Value | None:
    data, shape = inputs[0], _ints(inputs, 1, attrs, "shape")
    assert data is not None
    if shape is None:
        return None
    if not attrs.get("allowzero", 0):
        shape = [data.items.shape[i] if d == 0 else d for i, d in enumerate(shape)]
    return Value(data.items.reshape(shape), data.dtype)


def _cast(m: ShapeMath, inputs: Inputs, attrs: dict[str, Any]) -> Value | None:
    data, target = inputs[0], _DTYPES.get(attrs.get("to", 0))
    assert data is not None
    if target is None or (target == "bool" and not data.constant):
        return None
    return Value(m.elementwise(lambda v: int(bool(v)) if target == "bool" else v, data.items), target)


def _where(m: ShapeMath, inputs: Inputs, attrs: dict[str, Any]) -> Value | None:
    condition, a, b = inputs
    if condition is None or a is None or b is None:
        return None
    pick = lambda c, x, y: x if c else y
    return Value(m.elementwise(pick, condition.items, a.items, b.items), a.dtype)


def _slice(m: ShapeMath, inputs: Inputs, attrs: dict[str, Any]) -> Value | None:
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


def _product(m: ShapeMath, inputs: Inputs, attrs: dict[str, Any]) -> Value | None:
    data, axes = inputs[0], _ints(inputs, 1, attrs, "axes")
    assert data is not None
    if data.dtype == "bool" or (axes is not None and len(axes) != 1) or data.items.ndim != 1:
        return None
    total: Any = 1
    for item in data.list():
        total = m.simplify(total * item)
    return Value(boxed([total], (1,) if attrs.get("keepdims", 1) else ()), data.dtype)


def _range(m: ShapeMath, inputs: Inputs, attrs: dict[str, Any]) -> Value | None:
    if any(v is None or not v.constant for v in inputs) or len(inputs) != 3:
        return None
    start, limit, step = (v.list()[0] for v in inputs if v is not None)
    if step == 0:
        raise UnsupportedModel("Range with step 0", "correct the step")
    numbers = range(start, limit, step)
    assert inputs[0] is not None
    return Value(boxed(list(numbers), (len(numbers),)), inputs[0].dtype) if len(numbers) <= MAX_ELEMENTS else None


def _unary(fn: Callable[[Any], Any], boolean: bool = False) -> Evaluator:
    def run(m: ShapeMath, inputs: Inputs, attrs: dict[str, Any]) -> Value | None:
        data = inputs[0]
        assert data is not None
        if (data.dtype == "bool") != boolean and fn is not _identity:
            return None
        return Value(m.elementwise(fn, data.items), data.dtype)

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


def evaluate(m: ShapeMath, op_type: str, inputs: Inputs, attrs: dict[str, Any]) -> Value | None:
    """Return the result of one standard operator, or None when it is not shape arithmetic.

    An operand that is None was not given; what is given and unknown leaves nothing to evaluate, and nobody asks.
    """
    method = _EVALUATORS.get(op_type)
    if method is None or not inputs or inputs[0] is None:
        return None
    try:
        out = method(m, inputs, attrs)
    except Unknown:
        return None
    if out is None or out.items.size > MAX_ELEMENTS:
        return None
    bits = {"int64": 64, "int32": 32}.get(out.dtype)
    if bits is None:
        return out
    half = 1 << (bits - 1)
    wrap = lambda v: (v + half) % (2 * half) - half if isinstance(v, int) else v
    return Value(boxed([wrap(v) for v in out.list()], out.items.shape), out.dtype)
