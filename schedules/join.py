"""Join tensors along an axis, several results in one kernel: what a cache and what is appended to it become."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from .machine import Machine
from .steps import MOVED, PARALLEL_MIN_WORK
from .writing import argument, spread, writing

Extent: TypeAlias = int | ir.Expr


@dataclass(frozen=True)
class Join:
    """One result.

    Attributes
    ----------
    parts : tuple of tuple of (int or tvm.tirx.Expr)
        Shapes, equal but for the axis.
    axis : int
    dtype : str
    """

    parts: tuple[tuple[Extent, ...], ...]
    axis: int
    dtype: str

    @property
    def shape(self) -> tuple[Extent, ...]:
        """The result's shape."""
        first = self.parts[0]
        return (*first[: self.axis], sum(part[self.axis] for part in self.parts), *first[self.axis + 1 :])

    @property
    def blocks(self) -> Extent:
        """How many blocks of neighbouring elements each part has."""
        return math.prod(self.parts[0][: self.axis])

    @property
    def sizes(self) -> list[Extent]:
        """Elements of a block of each part."""
        return [math.prod(part[self.axis :]) for part in self.parts]


def kernel(joins: Sequence[Join], machine: Machine) -> tirx.PrimFunc:
    """Write a kernel.

    Its arguments are the parts of every join in turn, then the results.

    Parameters
    ----------
    joins : sequence of Join
    machine : Machine

    Returns
    -------
    tvm.tirx.PrimFunc
        Marked as scheduled, so that no rule touches it.
    """
    with writing("join") as builder:
        parts = [
            [argument(f"part{i}_{j}", shape, join.dtype) for j, shape in enumerate(join.parts)]
            for i, join in enumerate(joins)
        ]
        results = [argument(f"result{i}", join.shape, join.dtype) for i, join in enumerate(joins)]
        # All arguments come before the first alias.
        for join, given, result in zip(joins, parts, results):
            _copy(join, given, result, machine)
    return builder.get()


def _copy(join: Join, parts: Sequence[Any], result: Any, machine: Machine) -> None:
    """Emit a join: block by block, on all threads where there is enough of it."""
    blocks, sizes = join.blocks, join.sizes
    width: Extent = sum(sizes)
    if any(isinstance(extent, int) and extent == 0 for extent in (blocks, width)):
        return
    whole = T.decl_buffer((blocks, width), join.dtype, data=result.data, layout=None)
    flat = [T.decl_buffer((blocks, n), join.dtype, data=p.data, layout=None) for p, n in zip(parts, sizes)]

    def block(row: ir.Expr) -> None:
        offset: Extent = 0
        for source, size in zip(flat, sizes):
            if not (isinstance(size, int) and size == 0):
                with T.serial(size) as k:
                    T.buffer_store(whole, source[row, k], [row, offset + k])
            offset = offset + size

    spread(blocks, blocks * width >= PARALLEL_MIN_WORK * machine.lanes(join.dtype) // MOVED, block)
