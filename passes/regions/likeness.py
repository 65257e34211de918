"""Whether a gate is one of a cosine, asked of what it computes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from crossloom.schedules.semantic_gate import Apply, Dot, Gate, Given, Number, Scalar, dots_of


def cosine_of(spec: Gate) -> bool | None:
    """Return whether every logistic function in a gate is one of a cosine; None where none is of two vectors.

    The function is evaluated at vectors of several lengths and angles: its argument has to be the cosine times a number
    plus a number, whatever the lengths.
    """
    found: list[Scalar] = []

    def visit(value: Scalar) -> None:
        if isinstance(value, Apply):
            if value.name == "sigmoid" and any(d.left != d.right for d in dots_of(value)):
                found.append(value.args[0])
            for arg in value.args:
                visit(arg)

    for result in spec.results:
        for value in [result.number] if result.number is not None else [f for _, f in result.terms]:
            visit(value)
    if not found:
        return None
    return all(map(_is_cosine, found))


_NUMPY: dict[str, Callable[..., float]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "power": np.power,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "exp": np.exp,
    "tanh": np.tanh,
    "negative": np.negative,
    "abs": np.abs,
    "sigmoid": lambda a: 1 / (1 + np.exp(-a)),
}


def _is_cosine(value: Scalar) -> bool:
    pairs = {(d.left, d.right) for d in dots_of(value) if d.left != d.right}
    if len(pairs) != 1:
        return False
    ((_, right),) = pairs

    def at(value: Scalar, lengths: tuple[float, float], cosine: float) -> float:
        if isinstance(value, Number):
            return value.value
        if isinstance(value, Given):
            return 0.7 + 0.31 * value.place
        if isinstance(value, Dot):
            return float(np.prod([lengths[i == right] for i in (value.left, value.right)])) * (
                cosine if value.left != value.right else 1.0
            )
        return float(_NUMPY[value.name](*(at(a, lengths, cosine) for a in value.args)))

    angles = np.array([-0.8, -0.3, 0.0, 0.4, 0.9])
    with np.errstate(all="ignore"):
        seen = [[at(value, lengths, c) for c in angles] for lengths in ((2.0, 3.0), (0.7, 11.0), (5.0, 1.3))]
    line = np.polyfit(angles, seen[0], 1)
    near = 1e-3 * max(1.0, float(np.abs(seen[0]).max()))
    return bool(abs(line[0]) > near and all(np.abs(np.polyval(line, angles) - s).max() < near for s in seen))
