"""The buffers of a fused linear kernel, and what everything that writes one shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from ..writing import argument, cast
from .plan import Plan
from .spec import Dim, Norm, Output, Rotary, Spec, Turn

Expr: TypeAlias = ir.Expr
#: Weight and bias of a norm, those that are there.
Affine: TypeAlias = tuple[Any, Any]


def index(dims: Sequence[Dim], rows: Sequence[Expr], heads: Sequence[Expr], lane: Expr) -> list[Expr]:
    """Return the indices that dimensions stand for."""
    found = {"row": rows, "head": heads, "lane": [lane], "unit": [tirx.const(0, "int32")]}
    return [found[kind][i] for kind, i in dims]


class Operands:
    """The arguments of a kernel, or of one of several layers in a kernel, declared in the order of :class:`Spec`.

    Parameters
    ----------
    spec, cut : Spec, Plan
    name : str
        Goes into the arguments' names.
    x, results : bool
        Whether they are arguments; a layer behind another one reads what the kernel keeps for itself, and a layer in
        front of one leaves it there.
    """

    def __init__(self, spec: Spec, cut: Plan, name: str = "", x: bool = True, results: bool = True) -> None:
        self.spec, self.name = spec, name
        dtype, depth = spec.dtype, spec.depth
        self.x: Any = argument(f"x{name}", (*spec.rows, depth), dtype) if x else None
        self.norm = self._affine("", spec.norm, depth)
        turn = spec.turn
        self.turn = None if turn is None else self._tables("_x", turn, turn.rotary)
        self.weight = argument(f"weight{name}", (cut.groups, depth, cut.width), dtype)
        self.bias = argument(f"bias{name}", (cut.groups, cut.width), dtype) if spec.bias else None
        self.heads: list[Affine] = []
        self.tables: list[list[Any] | None] = []
        self.residuals: list[Any] = []
        for i, output in enumerate(spec.outputs):
            self.heads.append(self._affine(str(i), output.norm, output.lanes))
            rotary = output.rotary
            self.tables.append(None if rotary is None else self._tables(str(i), output, rotary))
            added = output.residual
            shape = None if added is None else spec.shape(added, output)
            self.residuals.append(None if shape is None else argument(f"residual{name}{i}", shape, dtype))
        shapes = [spec.shape(output.dims, output) for output in spec.outputs] if results else []
        self.results = [argument(f"result{name}{i}", shape, dtype) for i, shape in enumerate(shapes)]

    def _affine(self, of: str, norm: Norm | None, extent: int) -> Affine:
        """Declare a norm's weight and bias."""
        wanted = (False, False) if norm is None else (norm.weight, norm.bias)
        dtype = norm.dtype if norm is not None and norm.dtype else self.spec.dtype
        weight, bias = (
            argument(f"norm_{part}{self.name}{of}", (extent,), dtype) if there else None
            for part, there in zip(("weight", "bias"), wanted)
        )
        return weight, bias

    def _tables(self, of: str, turned: Output | Turn, rotary: Rotary) -> list[Any]:
        """Declare cos and sin of a rotation."""
        last, dtype = rotary.dim // 2 if rotary.half else rotary.dim, rotary.dtype or self.spec.dtype
        return [
            argument(f"{n}{self.name}{of}", (*self.spec.shape(dims[:-1], turned), last), dtype)
            for n, dims in (("cos", rotary.cos), ("sin", rotary.sin))
        ]

    def by_row(self) -> Any:
        """Return x with one axis of rows; an alias, which comes behind all arguments."""
        return T.decl_buffer((count(self.spec), self.spec.depth), self.spec.dtype, data=self.x.data, layout=None)


def count(spec: Spec) -> int | Expr:
    """Return the number of rows."""
    return math.prod(spec.rows) if spec.rows else 1


@dataclass
class Frame:
    """What everything that writes a layer shares.

    Attributes
    ----------
    spec : Spec
    cut : Plan
    lanes : int
        Elements of a register.
    given : Operands
    base : int or tvm.ir.Expr
        The row of x and of the results that is row 0 here.
    """

    spec: Spec
    cut: Plan
    lanes: int
    given: Operands
    base: int | Expr = 0

    @property
    def sums(self) -> str:
        """The type of sums."""
        return self.spec.sum_dtype

    def load(self, buffer: Any, *indices: Expr | int) -> Expr:
        """Return a value in the type of sums."""
        return cast(buffer[tuple(indices)], self.sums)

    def row(self, row: Expr | int) -> Expr | int:
        """Return the row of x and of the results that a row here is."""
        return row if isinstance(self.base, int) and self.base == 0 else row + self.base
