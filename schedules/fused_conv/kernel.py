"""Write a fused convolution kernel as TIR.

A piece of work copies the part of x that its places read, padded, each phase of the strides by itself, so that
neighbouring results read neighbouring values (a pointwise convolution reads x where it lies).  Tiles of the places
stand in vectors and those of the output channels beside each other: every turn multiplies some vectors of the copy by
one weight per channel.  What is done to the sums is done where they are.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..elementary import vectorizable_math
from ..loops import unravel
from ..machine import Machine
from ..writing import argument, spread, writing
from .copying import copy_group
from .layout import Expr, Layout, ceildiv
from .plan import Plan, plan
from .spec import Extent, Spec
from .tiles import TileWriter


class _Writer:
    """Emits one kernel; the arguments are declared in the order of :class:`Spec`."""

    def __init__(self, spec: Spec, cut: Plan, machine: Machine) -> None:
        one = spec.along_one_axis()
        self.layout = layout = Layout(one, cut, machine)
        x = argument("x", (spec.batch, spec.channels, *spec.size), spec.dtype)
        taps = math.prod(spec.kernel)
        self.weight = argument("weight", (spec.groups, cut.blocks, taps, layout.inner, cut.block), layout.sums)
        whole = (spec.batch, spec.outputs, *spec.result)
        given = [
            argument(f"{step.kind}{i}", (spec.outputs,) if step.takes == "channels" else whole, spec.dtype)
            if step.takes
            else None
            for i, step in enumerate(spec.steps)
        ]
        result = argument("result", whole, spec.dtype)
        # All arguments come before the first alias.
        self.operands = [
            self._by_channel(buffer) if buffer is not None and step.takes == "result" else buffer
            for buffer, step in zip(given, spec.steps)
        ]
        self.result = self._by_channel(result)
        shape = (spec.batch, spec.channels, *one.size)
        self.x = T.decl_buffer((math.prod(shape),) if cut.direct else shape, spec.dtype, data=x.data, layout=None)

    def _by_channel(self, buffer: Any) -> Any:
        """Return a tensor of the result's shape with one axis of places."""
        shape = (self.layout.spec.batch, self.layout.spec.outputs, self.layout.places)
        return T.decl_buffer(shape, buffer.dtype, data=buffer.data, layout=None)

    def write(self) -> None:
        """Go over the pieces of work, on all threads where that is worth waking them."""
        layout, cut = self.layout, self.layout.cut
        long = layout.width if layout.flat else layout.height
        stretches = ceildiv(long, cut.stretch) if cut.stretches is None else cut.stretches
        groups = layout.spec.groups // cut.apiece
        extents = (layout.spec.batch, *layout.planes, groups, cut.shares, stretches)

        def piece(at: Expr) -> None:
            batch, *planes, group, share, stretch = (T.bind(i) for i in unravel(at, extents))
            first, count = stretch * cut.stretch, cut.stretch
            if not isinstance(long, int):
                first = T.bind(first)
                count = T.bind(tirx.min(long - first, cut.stretch))
            elif long % cut.stretch:
                # The last one begins earlier instead of being shorter: two of them make the same values there.
                first = T.bind(tirx.min(first, long - cut.stretch))
            self._piece(batch, planes, group, share, first, count)

        spread(math.prod(extents), cut.parallel, piece)

    def _piece(self, batch: Expr, planes: list[Expr], group: Expr, share: Expr, first: Expr, count: Extent) -> None:
        layout, cut = self.layout, self.layout.cut

        def tiles(copy: Any, group: Expr) -> None:
            buffers = (copy, self.weight, self.operands, self.result)
            TileWriter(layout, *buffers, batch, planes, group, share, first, count).write()

        if cut.direct:
            tiles(self.x, group)
            return
        # Tiles read whole vectors: the last ones go beyond what they need.
        slack = (cut.vectors + 1) * layout.lanes
        copy = T.alloc_buffer((layout.inner * layout.plane + slack,), layout.sums, layout=None)
        with T.serial(cut.apiece) as i:
            one = T.bind(group * cut.apiece + i)
            copy_group(layout, self.x, copy, batch, planes, one, first)
            tiles(copy, one)


@lru_cache(maxsize=256)
def kernel(spec: Spec, machine: Machine) -> tirx.PrimFunc:
    """Write the kernel; that of a model's equal layers is written once.

    Parameters
    ----------
    spec : Spec
    machine : Machine

    Returns
    -------
    tvm.tirx.PrimFunc
        Takes and returns through its arguments, see :class:`Spec`; marked as scheduled, so that no rule touches it.
    """
    with writing("fused_conv") as builder:
        writer = _Writer(spec, plan(spec, machine), machine)
        if any(isinstance(extent, int) and extent <= 0 for extent in (spec.batch, *spec.result)):
            # TVM cannot lower loops of no turns with buffers in them.
            T.evaluate(tirx.const(0, "int32"))
        else:
            writer.write()
    return vectorizable_math(builder.get())
