"""Copy the part of x that a piece of work reads: padded, in the type of sums, each phase of the strides by itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..loops import unravel
from ..writing import cast
from .layout import Expr, Layout, bound, least, most
from .spec import Extent

#: Zeros that are written out one after another.
_FEW = 4


def copy_group(
    layout: Layout, x: Any, copy: Any, batch: Expr, planes: Sequence[Expr], group: Expr, first: Expr
) -> None:
    """Emit the copy of a group's channels.

    Parameters
    ----------
    layout : Layout
    x, copy : tvm.tirx.Buffer
        The second of one axis.
    batch, planes, group : tvm.ir.Expr
        Which image, which indices of the result's axes in front of its rows, which group.
    first : tvm.ir.Expr
        The piece's first row of the result, or place where there is one axis.
    """
    spec, geometry = layout.spec, layout.geometry

    def phase(number: Extent, starts: Sequence[Extent], channel: Expr, source: Expr) -> None:
        # Starts are where the phase's first place of each axis lies in x.
        at = T.bind(channel * layout.plane + number * layout.phase)
        if layout.flat:
            _row(layout, x, copy, (batch, source), at, first * spec.strides[0] + starts[0])
            return
        with T.serial(math.prod(layout.depths) * layout.lines) as row:
            *deep, line = unravel(row, (*layout.depths, layout.lines))
            places = [plane + i for plane, i in zip(planes, deep)] + [first + line]
            rows = [place * stride + start for place, stride, start in zip(places, spec.strides, starts)]
            begin = T.bind(at + row * layout.pitch)
            inside = tirx.all(*(tirx.all(i >= 0, i < size) for i, size in zip(rows, spec.size)))
            with T.If(inside):
                with T.Then():
                    _row(layout, x, copy, (batch, source, *rows), begin, starts[-1])
                with T.Else():
                    _zeros(layout, copy, begin, 0, layout.pitch)

    with T.serial(layout.inner) as channel:
        source = T.bind(group * layout.inner + channel)
        if geometry.is_patches and math.prod(geometry.phases) > 1:
            with T.serial(math.prod(geometry.phases)) as number:
                taps = unravel(number, geometry.phases)
                starts = [tap * d - before for tap, d, before in zip(taps, spec.dilation, spec.before)]
                phase(number, starts, channel, source)
            return
        for number, classes in enumerate(itertools.product(*geometry.lines)):
            phase(number, [line.phase - before for line, before in zip(classes, spec.before)], channel, source)


def _row(layout: Layout, x: Any, copy: Any, index: Sequence[Expr], at: Expr, start: Extent) -> None:
    """Copy one row, from the place ``start`` of it on, which may lie in front of it."""
    stride, pitch = layout.spec.strides[-1], layout.pitch
    index = [T.bind(i) for i in index]
    skipped = -(start // stride) if isinstance(start, int) else tirx.const(0, "int32") - tirx.floordiv(start, stride)
    there = layout.spec.size[-1] + (stride - 1) - start
    there = there // stride if isinstance(there, int) else tirx.floordiv(there, stride)
    end = bound(least(most(there, 0), pitch))
    begin = bound(least(most(skipped, 0), end))
    _zeros(layout, copy, at, 0, begin)
    if not isinstance(begin, int) or not isinstance(end, int) or begin < end:
        with T.serial(end - begin) as i:
            place = (*index, (begin + i) * stride + start)
            value = x[place]
            T.buffer_store(copy, cast(value, layout.sums), [at + begin + i])
    _zeros(layout, copy, at, end, pitch)


def _zeros(layout: Layout, copy: Any, at: Expr, begin: Extent, end: Extent) -> None:
    zero = tirx.const(0.0, layout.sums)
    if isinstance(begin, int) and isinstance(end, int) and end - begin <= _FEW:
        for i in range(begin, end):
            T.buffer_store(copy, zero, [at + i])
        return
    with T.serial(end - begin) as i:
        T.buffer_store(copy, zero, [at + begin + i])
