"""What the values of a fused linear region are: rows of x, columns of its layers, and what has been done to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from tvm import relax, tirx

from crossloom.schedules.fused_linear import Dim, Norm, Output, Rotary, Turn

from ..matching.spelling import dtype, extents
from .views import Axis, View

#: What sums are made of.
FLOATS = frozenset({"float16", "float32", "float64"})


class NoKernel(Exception):
    """The region holds something the kernel cannot do; the text says what."""


@dataclass(frozen=True)
class Table:
    """cos or sin, and which axis of what is turned each of its own follows but for the last; None for none."""

    operand: relax.Expr
    follows: tuple[Axis | None, ...]


@dataclass(frozen=True)
class Turned:
    """A rotation, and the axes of what it turns."""

    convention: str
    dim: int
    half: bool
    cos: Table
    sin: Table
    axes: tuple[Axis, ...]


@dataclass(frozen=True)
class Normed:
    """A norm of lanes, and the axes of what it norms."""

    norm: Norm
    operands: tuple[relax.Expr, ...]
    axes: tuple[Axis, ...]


@dataclass(frozen=True)
class Rows:
    """x, normed and turned or not, as a view of its last axis."""

    x: relax.Expr
    view: View
    norm: Norm | None = None
    operands: tuple[relax.Expr, ...] = ()
    turn: Turned | None = None

    def is_same(self, other: Rows) -> bool:
        """Return whether both are the same value."""
        alike = self.x.same_as(other.x) and self.norm == other.norm and self.turn is other.turn
        return alike and all(a.same_as(b) for a, b in zip(self.operands, other.operands))


@dataclass(frozen=True)
class Columns:
    """A result in the making; ``step`` is the last step taken, in the kernel's order."""

    view: View
    dtype: str
    step: int = 0
    gate: int | None = None
    activation: str = ""
    scale: float = 1.0
    norm: Normed | None = None
    turn: Turned | None = None
    residual: tuple[relax.Expr, tuple[Axis | None, ...]] | None = None


#: Steps in the kernel's order.
ACTIVATED, SCALED, NORMED, ROTATED, ADDED = 1, 2, 3, 4, 5

Value: TypeAlias = "Rows | Columns | tuple[Columns, ...]"


@dataclass
class Lift:
    """Tells values of a region's function in terms of one that calls it.

    Attributes
    ----------
    outer : mapping of relax.Var to relax.Expr
        Arguments by parameter.
    shape : sequence of int or tvm.tirx.Expr
        Of x, as the caller has it.
    """

    outer: Mapping[relax.Expr, relax.Expr]
    shape: Sequence[int | tirx.Expr]
    _renewed: dict[int, Axis] = field(default_factory=dict)

    def operand(self, expr: relax.Expr) -> relax.Expr:
        """Return an operand."""
        return self.outer.get(expr, expr) if isinstance(expr, relax.Var) else expr

    def axis(self, old: Axis) -> Axis:
        """Return an axis, the same one every time it is asked for."""
        if old.row is None:
            return old
        return self._renewed.setdefault(id(old), replace(old, extent=self.shape[old.row]))

    def _axes(self, old: Sequence[Axis]) -> tuple[Axis, ...]:
        return tuple(map(self.axis, old))

    def _table(self, old: Table) -> Table:
        return Table(self.operand(old.operand), tuple(a and self.axis(a) for a in old.follows))

    def columns(self, old: Columns) -> Columns:
        """Return a result in the making."""
        norm, turn, residual = old.norm, old.turn, old.residual
        if norm is not None:
            norm = replace(norm, operands=tuple(map(self.operand, norm.operands)), axes=self._axes(norm.axes))
        if turn is not None:
            turn = replace(turn, cos=self._table(turn.cos), sin=self._table(turn.sin), axes=self._axes(turn.axes))
        if residual is not None:
            residual = self.operand(residual[0]), tuple(a and self.axis(a) for a in residual[1])
        view = replace(old.view, axes=self._axes(old.view.axes))
        return replace(old, view=view, norm=norm, turn=turn, residual=residual)


def follows(operand: relax.Expr, axes: Sequence[Axis]) -> tuple[Axis | None, ...]:
    """Return which axis each dimension of a broadcast operand follows, None where it is 1."""
    shape = extents(operand)
    return tuple(
        None if isinstance(extent, int) and extent == 1 else axis
        for extent, axis in zip(shape, axes[len(axes) - len(shape) :], strict=True)
    )


def _heads(axes: Sequence[Axis]) -> tuple[list[Axis], Callable[[Axis | None], Dim]]:
    """Return the axes in front of the lanes that are heads, and what says of an axis which dimension it is."""
    heads = [a for a in axes[:-1] if a.row is None and not a.is_unit]

    def dim(axis: Axis | None) -> Dim:
        if axis is None or axis.is_unit:
            return ("unit", 0)
        if axis.row is not None:
            return ("row", axis.row)
        return ("head", next(i for i, head in enumerate(heads) if head is axis))

    return heads, dim


def output_of(value: Columns) -> tuple[Output, list[relax.Expr]]:
    """Return an output of the kernel, and its tables and residual."""
    axes = value.view.axes
    lane = axes[-1] if axes else None
    if lane is None or lane.row is not None or not isinstance(lane.extent, int) or (lane.stride != 1):
        if lane is None or not lane.is_unit:
            raise NoKernel("a result whose last axis is not made of neighbouring columns")
    heads, dim = _heads(axes)

    def follow(found: Sequence[Axis | None]) -> tuple[Dim, ...]:
        # The last dimension is lanes, unless it is 1.
        if not found:
            return ()
        return (*(dim(a) for a in found[:-1]), ("unit", 0) if found[-1] is None else ("lane", 0))

    extras: list[relax.Expr] = []
    norm = rotary = None
    if value.norm is not None:
        if value.norm.axes[-1] is not lane:
            raise NoKernel("a norm along another axis than the last one")
        norm = value.norm.norm
        extras += value.norm.operands
    if value.turn is not None:
        if value.turn.axes[-1] is not lane:
            raise NoKernel("a rotation along another axis than the last one")
        rotary = _rotation(value.turn, dim)
        extras += [value.turn.cos.operand, value.turn.sin.operand]
    residual = None
    if value.residual is not None:
        extras.append(value.residual[0])
        residual = follow(value.residual[1])
    return (
        Output(
            (*(dim(a) for a in axes[:-1]), ("lane", 0)),
            tuple(int(a.extent) for a in heads),
            int(lane.extent),
            value.view.first,
            tuple(a.stride for a in heads),
            value.gate,
            value.activation,
            value.scale,
            norm,
            rotary,
            residual,
        ),
        extras,
    )


def _rotation(turn: Turned, dim: Callable[[Axis | None], Dim]) -> Rotary:
    """Return a rotation whose tables follow axes, each of which is what ``dim`` says."""
    cos, sin = ((*(dim(a) for a in table.follows), ("lane", 0)) for table in (turn.cos, turn.sin))
    return Rotary(turn.convention, turn.dim, cos, sin, turn.half, dtype(turn.cos.operand))


def turn_of(turn: Turned) -> Turn:
    """Return a rotation of x."""
    lane = turn.axes[-1]
    heads, dim = _heads(turn.axes)
    if lane.row is not None or lane.stride != 1 or not isinstance(lane.extent, int):
        raise NoKernel("a rotation along other than neighbouring values of x")

    extents = tuple(int(a.extent) for a in heads)
    return Turn(_rotation(turn, dim), extents, tuple(a.stride for a in heads), lane.extent)
