"""Where the values of one piece of work lie: the padded copy of x, its phases, planes and rows, and the result's."""

from __future__ import annotations

import math
from typing import TypeAlias

from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from ..machine import Machine
from .geometry import Geometry
from .plan import Plan, copied
from .spec import Extent, Spec

Expr: TypeAlias = ir.Expr


def ceildiv(a: Extent, b: Extent) -> Extent:
    """Return a quotient, rounded up."""
    return -(-a // b) if isinstance(a, int) and isinstance(b, int) else tirx.floordiv(a + (b - 1), b)


def least(a: Extent, b: Extent) -> Extent:
    """Return the smaller one."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else tirx.min(a, b)


def most(a: Extent, b: Extent) -> Extent:
    """Return the larger one."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else tirx.max(a, b)


def bound(value: Extent) -> Extent:
    """Give an expression a name in the kernel; a number stays one."""
    return value if isinstance(value, int) else T.bind(value)


class Layout:
    """A kernel's extents.

    Attributes
    ----------
    spec, cut, geometry
    lanes, sums : int, str
        Values in a register, and their type.
    inner, outputs : int
        Channels of a group.
    flat : bool
        Whether there is one axis only; a piece is then a stretch of places, not of rows.
    joined : bool
        Whether rows follow one another without a gap in the copy: a piece is one row.
    planes : tuple
        Extents of the result's axes in front of its rows.
    height, width : int or tvm.ir.Expr
        Rows of the result, and places in each.
    pitch, lines, depths
        Extents of a phase in the copy: its places, its rows, and the axes in front of them.
    phase, plane : int or tvm.ir.Expr
        Values of a phase, and from one channel to the next.
    """

    def __init__(self, spec: Spec, cut: Plan, machine: Machine) -> None:
        self.spec, self.cut, self.geometry = spec, cut, Geometry.of(spec)
        self.lanes, self.sums = machine.lanes(spec.sum_dtype), spec.sum_dtype
        self.inner, self.outputs = spec.channels // spec.groups, spec.outputs // spec.groups
        reach = self.geometry.reach
        self.flat = len(spec.size) == 1
        self.joined = not self.flat and not reach[-1]
        *planes, self.width = spec.result
        self.height: Extent = 1 if self.flat else planes.pop()
        self.planes = tuple(planes)
        self.pitch: Extent = (cut.stretch if self.flat else self.width) + reach[-1]
        self.lines = 1 if self.flat else cut.stretch + reach[-2]
        self.depths = tuple(r + 1 for r in reach[:-2])
        self.phase: Extent = math.prod(self.depths) * self.lines * self.pitch
        self.plane: Extent = math.prod(self.geometry.phases) * self.phase
        if cut.direct:
            self.plane = spec.size[0]
        elif isinstance(self.plane, int):
            self.plane = copied(self.plane, self.sums)

    @property
    def places(self) -> Extent:
        """Places of the result."""
        return math.prod((*self.planes, self.height, self.width))
