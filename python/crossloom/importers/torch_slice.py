"""Translate slices of dynamic dimensions into sizes that stay simple: ``T - 1``, not ``min(max(...), ...)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tvm
from tvm import relax

from .onnx_shaped import strided_slice
from .onnx_symbolic import ShapeMath, Value, boxed

_END = 2**63 - 1


def slice_converter(lower_bounds: Mapping[str, int]) -> Callable[[Any, Any], relax.Expr]:
    """Return a ``custom_convert_map`` entry for ``aten.slice``.

    Parameters
    ----------
    lower_bounds : mapping of str to int
        Least size of dynamic dimensions (elements): what lets a negative bound be resolved.
    """
    math = ShapeMath(lower_bounds)

    def convert(node: Any, importer: Any) -> relax.Expr:
        given: dict[str, Any] = {"dim": 0, "start": None, "end": None, "step": 1}
        given.update(zip(given, node.args[1:]))
        given.update(node.kwargs)
        x = importer.env[node.args[0]]
        value = lambda key, default: default if given[key] is None else _number(importer, given[key])
        start, end, step = value("start", 0), value("end", _END), value("step", 1)
        if isinstance(start, int) and isinstance(end, int) and (start, step) == (0, 1) and end >= _END:
            return x
        one = lambda item: Value(boxed([item], (1,)))
        parts: list[Value | None] = [one(start), one(end), one(int(given["dim"])), one(step)]
        return strided_slice(math, f"{node.name!r}", importer.block_builder, x, parts)

    return convert


def _number(importer: Any, bound: Any) -> Any:
    """Return a bound as an integer or an int64 expression."""
    if isinstance(bound, int):
        return bound
    value = importer.env[bound]
    if isinstance(value, int):
        return value
    if isinstance(value, tvm.ir.Expr) and tvm.ir.is_prim_expr(value):
        return value
    raise ValueError(f"a slice bound that is computed from data: {bound}")
