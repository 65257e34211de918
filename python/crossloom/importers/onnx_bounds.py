"""Sizes that a graph's constants fix, or bound from below: a Split into 2 and 3 makes its axis 5.

TVM's kernels do not look at such sizes: with another they would read past the end of a tensor.  In the entry they
are checked when it is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from tvm import tirx

from crossloom.errors import UnsupportedModel
from crossloom.importers.gather import known_sizes
from crossloom.importers.onnx_symbolic import ShapeMath, Value
from crossloom.importers.unify import resolve

#: Operators of which :meth:`Bounds.note` knows what they ask.
BOUNDING = ("Split", "TopK", "Gather")


class Bounds:
    """What the nodes converted so far ask of symbolic dimensions.

    Attributes
    ----------
    fixed : dict of str to int
        The one size (elements) that a dimension must have.
    lower : dict of str to int
        The least size (elements) of a dimension.
    """

    def __init__(self, m: ShapeMath) -> None:
        self._math = m
        self.fixed: dict[str, int] = {}
        self.lower: dict[str, int] = {}

    def _solve(self, size: Any, value: int) -> tuple[str, int] | None:
        """Return the variable of ``variable + constant`` and what makes that `value`; None for other sizes."""
        free = list(tirx.analysis.undefined_vars(size))
        rest = self._math.simplify(size - free[0]) if len(free) == 1 else None
        return (free[0].name, value - rest) if isinstance(rest, int) else None

    def exactly(self, where: str, size: Any, value: int) -> None:
        """Ask that a size be `value`."""
        if isinstance(size, int):
            if size != value:
                raise UnsupportedModel(f"{where}: needs an axis of size {value}, which has {size}", "correct the sizes")
            return
        solved = self._solve(size, value)
        if solved is None:
            return
        name, known = solved
        if known < 0 or self.fixed.setdefault(name, known) != known:
            raise UnsupportedModel(
                f"{where}: needs an axis of size {value}, which is {size} with {name} = {self.fixed.get(name, known)}",
                "correct the sizes",
            )

    def at_least(self, size: Any, value: int) -> None:
        """Ask that a symbolic size be `value` or more."""
        solved = None if isinstance(size, int) else self._solve(size, value)
        # An absurd index is damage, not a size; the gather itself keeps it inside the tensor.
        if solved is not None and self.lower.get(solved[0], 0) < solved[1] < 2**31:
            self.lower[solved[0]] = solved[1]

    def note(
        self,
        node: onnx.NodeProto,
        where: str,
        x: Any,
        second: Value | np.ndarray | None,
        attrs: Mapping[str, Any],
    ) -> None:
        """Ask what a Split, TopK or Gather asks of the sizes of its operand `x`.

        Parameters
        ----------
        node : onnx.NodeProto
        where : str
            The node's name in messages.
        x : relax.Expr
        second : Value, numpy.ndarray or None
            The second operand, where it is known.
        attrs : mapping of str to Any
        """
        dims = known_sizes(x)
        axis = int(attrs.get("axis", -1 if node.op_type == "TopK" else 0))
        if not dims or not -len(dims) <= axis < len(dims):
            return
        if isinstance(second, Value):
            second = np.array(second.list(), "int64") if second.constant else None
        size = dims[axis]
        if node.op_type == "Split":
            parts = list(attrs.get("split", ())) if second is None else second.reshape(-1).tolist()
            if parts:
                self.exactly(where, size, sum(parts))
        elif node.op_type == "TopK":
            k = attrs.get("k") if second is None else second.reshape(-1)[0]
            if k is not None and isinstance(size, int) and int(k) > size:
                raise UnsupportedModel(f"{where}: takes {k} elements of an axis of size {size}", "correct k")
            self.at_least(size, int(k or 0))
        elif node.op_type == "Gather" and second is not None and second.size:
            self.at_least(size, max(int(second.max()) + 1, -int(second.min())))


def with_sizes(shapes: Mapping[str, list[Any]], fixed: Mapping[str, int]) -> dict[str, list[Any]]:
    """Return the inputs' shapes with symbols replaced by the sizes they are fixed to."""

    def bind(dim: Any) -> Any:
        if isinstance(dim, int):
            return dim
        values = {v: tirx.IntImm("int64", fixed[v.name]) for v in tirx.analysis.undefined_vars(dim) if v.name in fixed}
        known = resolve(dim, values) if values else dim
        return int(known.value) if isinstance(known, tirx.IntImm) else known

    return {name: [bind(dim) for dim in dims] for name, dims in shapes.items()}


def narrowed(upper: Mapping[str, int], fixed: Mapping[str, int], lower: Mapping[str, int]) -> dict[str, int]:
    """Return the caller's upper bounds of the dimensions that are left.

    Parameters
    ----------
    upper : mapping of str to int
    fixed, lower : mapping of str to int
        What the graph fixed, and the least values it asks (elements).

    Raises
    ------
    UnsupportedModel
        An upper bound lies below what the graph needs.
    """
    for name, least in {**lower, **fixed}.items():
        if least > upper.get(name, least):
            raise UnsupportedModel(
                f"dimension '{name}' is at most {upper[name]}, but the graph needs {least}", "raise its upper bound"
            )
    return {name: value for name, value in upper.items() if name not in fixed}
