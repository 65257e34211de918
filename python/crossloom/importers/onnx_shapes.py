"""Input shapes: symbolic dimensions by name, expressions of them, and the caller's overrides."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from tvm import tirx

from crossloom.errors import UnsupportedModel, UsageError
from crossloom.importers.onnx_load import checked_dims

_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_][A-Za-z_0-9.]*)|(//|[-+*/()]))")


class Symbols:
    """The symbolic dimensions of one graph.

    Parameters
    ----------
    bound : mapping of str to int
        Symbols that the caller fixed.
    """

    def __init__(self, bound: Mapping[str, int] | None = None) -> None:
        self.bound = dict(bound or {})
        self._vars: dict[str, Any] = {}

    def var(self, name: str) -> Any:
        """Return the int64 variable of that name, or the integer it is bound to."""
        if name in self.bound:
            return self.bound[name]
        if name not in self._vars:
            self._vars[name] = tirx.Var(name, "int64")
        return self._vars[name]

    def dim(self, text: str) -> Any:
        """Return what a ``dim_param`` means.

        An arithmetic expression of names (``"P + 1"``) becomes the expression; any other text is one symbol.
        """
        if text in self.bound:
            return self.bound[text]
        try:
            return _Parser(text, self).parse()
        except ValueError:
            return self.var(text)


class _Parser:
    """Recursive descent over ``+ - * / // ( )``; ``/`` is floor division, as exporters mean it."""

    def __init__(self, text: str, symbols: Symbols) -> None:
        self.tokens: list[str] = []
        position = 0
        text = text.rstrip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None or len(self.tokens) > 64:
                raise ValueError(text)
            self.tokens.append(match.group().strip())
            position = match.end()
        self.symbols = symbols

    def parse(self) -> Any:
        value = self._sum()
        if self.tokens:
            raise ValueError("trailing text")
        return value

    def _take(self, *wanted: str) -> str | None:
        if self.tokens and self.tokens[0] in wanted:
            return self.tokens.pop(0)
        return None

    def _sum(self) -> Any:
        value = self._product()
        while (op := self._take("+", "-")) is not None:
            right = self._product()
            value = value + right if op == "+" else value - right
        return value

    def _product(self) -> Any:
        value = self._atom()
        while (op := self._take("*", "/", "//")) is not None:
            right = self._atom()
            if op == "*":
                value = value * right
            elif isinstance(right, int) and right == 0:
                raise ValueError("division by zero")
            else:
                value = value // right
        return value

    def _atom(self) -> Any:
        if self._take("("):
            value = self._sum()
            if not self._take(")"):
                raise ValueError("unbalanced parenthesis")
            return value
        if not self.tokens or self.tokens[0] in ("+", "-", "*", "/", "//", ")"):
            raise ValueError("operand expected")
        token = self.tokens.pop(0)
        return int(token) if token.isdigit() else self.symbols.var(token)


def input_types(graph: onnx.GraphProto, overrides: Mapping[str, Sequence[int | str]] | None) -> dict[str, list[Any]]:
    """Return the shape of every graph input, as Relax takes it.

    Parameters
    ----------
    graph : onnx.GraphProto
        Its inputs are rewritten where `overrides` changes them, so that shape inference sees the same.
    overrides : mapping of str to sequence of int or str, optional
        Shapes by input name; an integer where the model has a symbol fixes that symbol everywhere.

    Returns
    -------
    dict of str to list
        Integers and int64 expressions, one per axis.

    Raises
    ------
    UsageError
        An override names no input, has another rank, or contradicts a fixed dimension.
    UnsupportedModel
        An input has no known rank, or a dimension is negative or too large.
    """
    names = [value.name for value in graph.input]
    for name in overrides or {}:
        if name not in names:
            raise UsageError(f"input_shapes names '{name}', which is no input", f"the inputs are: {', '.join(names)}")
    bound: dict[str, int] = {}
    for value in graph.input:
        _apply_override(value, (overrides or {}).get(value.name), bound)
    symbols = Symbols(bound)
    shapes: dict[str, list[Any]] = {}
    for value in graph.input:
        tensor = value.type.tensor_type
        if not tensor.HasField("shape"):
            raise UnsupportedModel(
                f"input '{value.name}': its rank is unknown", f"pass input_shapes={{'{value.name}': (...)}}"
            )
        dims: list[Any] = []
        for axis, dim in enumerate(tensor.shape.dim):
            if dim.HasField("dim_value"):
                dims.append(int(dim.dim_value))
            elif dim.dim_param and dim.dim_param != "?":
                dims.append(symbols.dim(dim.dim_param))
            else:
                dims.append(symbols.var(f"{value.name}_d{axis}"))
        checked_dims([d for d in dims if isinstance(d, int)], f"input '{value.name}'")
        shapes[value.name] = dims
    return _solvable(shapes, symbols)


def _apply_override(value: onnx.ValueInfoProto, wanted: Sequence[int | str] | None, bound: dict[str, int]) -> None:
    if wanted is None:
        return
    if isinstance(wanted, str):
        raise UsageError(f"input_shapes['{value.name}'] is a string", "give one integer or name per axis")
    shape = value.type.tensor_type.shape
    known = value.type.tensor_type.HasField("shape")
    if known and len(shape.dim) != len(wanted):
        raise UsageError(
            f"input '{value.name}' has {len(shape.dim)} axes, input_shapes gives {len(wanted)}",
            "give one integer or name per axis",
        )
    if not known:
        shape.SetInParent()
        for _ in wanted:
            shape.dim.add()
    for axis, (dim, new) in enumerate(zip(shape.dim, wanted)):
        if not isinstance(new, str) and int(new) < 0:
            raise UsageError(f"input '{value.name}' axis {axis}: {new} is negative", "give a size or a name")
        if dim.HasField("dim_value") and not isinstance(new, str) and dim.dim_value != int(new):
            raise UsageError(
                f"input '{value.name}' axis {axis} is {dim.dim_value} in the model, input_shapes says {new}",
                "a size that the model fixes cannot change; export it with a dynamic axis",
            )
        if isinstance(new, str):
            dim.dim_param = new
            continue
        if dim.dim_param and bound.setdefault(dim.dim_param, int(new)) != int(new):
            raise UsageError(
                f"dimension '{dim.dim_param}' is given as both {bound[dim.dim_param]} and {new}",
                "one name is one size",
            )
        dim.dim_value = int(new)


def _solvable(shapes: dict[str, list[Any]], symbols: Symbols) -> dict[str, list[Any]]:
    """Replace expressions whose symbols no input carries alone: nothing gives them a value at run time."""
    alone = {str(d) for dims in shapes.values() for d in dims if isinstance(d, tirx.Var)}
    for dims in shapes.values():
        for axis, dim in enumerate(dims):
            if isinstance(dim, int) or isinstance(dim, tirx.Var):
                continue
            free = {str(v) for v in tirx.analysis.undefined_vars(dim)}
            if not free <= alone:
                dims[axis] = symbols.var(re.sub(r"\W+", "_", str(dim)).strip("_"))
    return shapes
