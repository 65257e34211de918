"""What a fused linear kernel does to rows: norms, rotations, and widening in front of the sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..loops import along, sum_along, unravel
from .operands import Affine, Expr, Frame, index
from .spec import Dim, Norm, Rotary, Turn

#: The value at a place of a row.
Value = Callable[[Expr], Expr]
#: Standard deviations from 0 to a row's mean, from which on what cancels costs more than the last digits.
_FAR = 8.0


class Rows:
    """Rows of x as the sums take them.

    Parameters
    ----------
    frame : Frame
    source : Any
        x with one axis of rows, ``(rows, depth)``.
    kept : bool
        Whether the source is a buffer of the kernel's own, of the type of sums, in which row 0 is row 0 here; what is
        done to rows is then done in place.
    most : int or tvm.ir.Expr
        The most rows there are at a time.
    """

    def __init__(self, frame: Frame, source: Any, kept: bool, most: int | Expr) -> None:
        self.frame, self.source, self.kept = frame, source, kept
        spec = frame.spec
        #: A factor of each row's sums, which an RMS norm without weight is.
        self.factor: Any = None
        #: The mean of each row that lies far from 0, 0 for others: its sums of centred weights cancel, and are made
        #: anew of the row less its mean.
        self.far: Any = None
        self.ready: Any = None
        if not spec.prepares:
            return
        if spec.norm is not None and spec.norm.scales_sums:
            self.factor = T.alloc_buffer((most,), frame.sums, layout=None)
            if spec.norm.centred:
                self.far = T.alloc_buffer((most,), frame.sums, layout=None)
        if kept:
            self.ready = source if self.factor is None and spec.norm is not None else None
        elif spec.turn is not None or self.factor is None or spec.dtype != frame.sums:
            self.ready = T.alloc_buffer((most, spec.depth), frame.sums, layout=None)

    def load(self, row: Expr | int, k: Expr | int) -> Expr:
        """Return a value that the sums take."""
        if self.ready is not None:
            return self.frame.load(self.ready, row, k)
        return self._given(row, k)

    def _given(self, row: Expr | int, k: Expr | int) -> Expr:
        return self.frame.load(self.source, row if self.kept else self.frame.row(row), k)

    def prepare(self, count: int | Expr) -> None:
        """Norm, turn and widen ``count`` rows; or find the factor that a norm is."""
        if self.factor is None and self.ready is None:
            return
        with T.parallel(count) if self.frame.cut.parallel_rows else T.serial(count) as row:
            self._row(row)

    def _row(self, row: Expr) -> None:
        frame, spec = self.frame, self.frame.spec

        def x(k: Expr) -> Expr:
            return self._given(row, k)

        value: Value = x
        if spec.norm is not None:
            value, factor, mean = normed(frame, spec.norm, frame.given.norm, spec.depth, x)
            if self.factor is not None:
                T.buffer_store(self.factor, factor, [row])
                value = x
            if self.far is not None:
                zero, most = tirx.const(0.0, frame.sums), tirx.const(_FAR, frame.sums)
                far = tirx.abs(mean * factor) > most
                T.buffer_store(self.far, tirx.Select(far, mean, zero), [row])
        if spec.turn is not None:
            self._turned(spec.turn, row, value)
        elif self.ready is not None:
            along(spec.depth, frame.lanes, lambda k: T.buffer_store(self.ready, value(k), [row, k]))

    def _turned(self, turn: Turn, row: Expr, value: Value) -> None:
        """Store one row of x, turned."""
        frame, rotary = self.frame, turn.rotary
        rows = unravel(frame.row(row), frame.spec.rows)
        with T.serial(math.prod(turn.heads)) as head:
            heads = unravel(head, turn.heads)
            start: Expr = tirx.const(0, "int32")
            for i, stride in zip(heads, turn.strides):
                start = start + i * stride

            def at(dims: Sequence[Dim], lane: Expr) -> list[Expr]:
                return index(dims, rows, heads, lane)

            def store(result: Expr, lane: Expr) -> None:
                T.buffer_store(self.ready, result, [row, start + lane])

            def pair(first: Expr) -> None:
                values = [value(start + lane) for lane in lanes_of_pair(rotary, first)]
                rotate(frame, rotary, frame.given.turn, values, first, at, store)

            along(rotary.dim // 2, frame.lanes, pair)
            rest = turn.lanes - rotary.dim
            along(rest, frame.lanes, lambda k: store(value(start + (k + rotary.dim)), k + rotary.dim))


def normed(frame: Frame, norm: Norm, affine: Affine, extent: int, x: Value) -> tuple[Value, Expr, Expr | None]:
    """Return what a norm makes of each of ``extent`` values, its factor, and the mean that it takes off."""
    sums, lanes = frame.sums, frame.lanes
    mean = None
    if norm.kind == "layer":
        mean = sum_along(extent, lanes, sums, x)
        mean = T.bind(mean * tirx.const(1.0 / extent, sums))

    def centred(k: Expr) -> Expr:
        return x(k) if mean is None else x(k) - mean

    squares = sum_along(extent, lanes, sums, lambda k: centred(k) * centred(k))
    spread = squares * tirx.const(1.0 / extent, sums) + tirx.const(norm.epsilon, sums)
    factor = T.bind(tirx.const(1.0, sums) / tirx.sqrt(spread))
    weight, bias = affine

    def value(k: Expr) -> Expr:
        out = centred(k) * factor
        out = out if weight is None else out * frame.load(weight, k)
        return out if bias is None else out + frame.load(bias, k)

    return value, factor, mean


def lanes_of_pair(rotary: Rotary, pair: Expr) -> tuple[Expr, Expr]:
    """Return the two lanes that turn together."""
    return (pair, pair + rotary.dim // 2) if rotary.convention == "half-split" else (pair * 2, pair * 2 + 1)


def rotate(
    frame: Frame,
    rotary: Rotary,
    tables: Sequence[Any] | None,
    values: Sequence[Expr],
    pair: Expr,
    at: Callable[[Sequence[Dim], Expr], list[Expr]],
    store: Callable[[Expr, Expr], None],
) -> None:
    """Store a pair of lanes, turned; ``at`` returns the indices of a lane that dimensions stand for."""
    assert tables is not None
    lanes = lanes_of_pair(rotary, pair)
    cos, sin = (
        [frame.load(table, *at(dims, pair if rotary.half else lane)) for lane in lanes]
        for table, dims in zip(tables, (rotary.cos, rotary.sin))
    )
    store(values[0] * cos[0] - values[1] * sin[0], lanes[0])
    store(values[1] * cos[1] + values[0] * sin[1], lanes[1])
