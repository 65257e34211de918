"""Sums of products of one tile: vectors of places times single weights, in registers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import tirx as T

from .geometry import Line
from .layout import Expr, Layout
from .spec import Extent

#: Input channels that are written out one after another instead of in a loop; and these times taps.
_FEW_CHANNELS, _FEW_PRODUCTS = 4, 9


@dataclass(frozen=True)
class Tile:
    """Some places of a piece.

    Attributes
    ----------
    number : tvm.ir.Expr
        Of the tile among those of the piece.
    where, target : tvm.ir.Expr
        Its first place in a plane of the copy, and in one of the result.
    rows, vectors : int
        Its rows, and vectors in each.
    valid : int or tvm.ir.Expr
        Places that there are in a row.
    """

    number: Expr
    where: Expr
    target: Expr
    rows: int
    vectors: int
    valid: Extent

    @property
    def count(self) -> int:
        """Vectors of one channel."""
        return self.rows * self.vectors


def each_vector(layout: Layout, tile: Tile, emit: Callable[[int, Expr], None]) -> None:
    """Emit what is done to each vector of a tile's channels: ``emit(number, lane)``."""
    for at in range(layout.cut.block * tile.count):
        with T.vectorized(layout.lanes) as lane:
            emit(at, lane)


def add_products(
    layout: Layout,
    sums: Any,
    copy: Any,
    weight: Callable[[Extent, Extent, int], Expr],
    tile: Tile,
    channel: Extent,
    depth: Extent,
) -> None:
    """Emit the products of some input channels, added to a tile's sums.

    Parameters
    ----------
    layout : Layout
    sums, copy : tvm.tirx.Buffer
    weight : callable (tap, input channel, output channel of the block) -> tvm.ir.Expr
    tile : Tile
    channel, depth : int or tvm.ir.Expr
        The first input channel, and their number.
    """

    def step(at: Expr, tap: Extent, channel: Extent) -> None:
        for o in range(layout.cut.block):
            for v in range(tile.count):
                row, place = divmod(v, tile.vectors)
                shift, i = row * layout.pitch + place * layout.lanes, o * tile.count + v
                with T.vectorized(layout.lanes) as lane:
                    term = copy[at + shift + lane] * weight(tap, channel, o)
                    T.buffer_store(sums, sums[i, lane] + term, [i, lane])

    def channels(at: Expr, tap: Extent) -> None:
        if isinstance(depth, int) and depth <= _FEW_CHANNELS:
            for c in range(depth):
                step(at + c * layout.plane, tap, channel + c)
            return
        with T.serial(depth) as c:
            step(at + c * layout.plane, tap, channel + c)

    start = T.bind(tile.where + channel * layout.plane)
    if layout.geometry.is_patches:
        with T.serial(math.prod(layout.geometry.phases)) as i:
            channels(start + i * layout.phase, i)
        return
    tap = 0
    for number, classes in enumerate(itertools.product(*layout.geometry.lines)):
        pitches: list[Extent] = [layout.pitch * layout.lines, layout.pitch, 1][-len(classes) :]
        begin = start + number * layout.phase
        for line, pitch in zip(classes, pitches):
            begin = begin + line.at * pitch
        _over_taps(layout, classes, pitches, T.bind(begin), tap, channels)
        tap += math.prod(line.count for line in classes)


def _over_taps(
    layout: Layout,
    classes: Sequence[Line],
    pitches: Sequence[Extent],
    at: Expr,
    tap: Extent,
    emit: Callable[[Expr, Extent], None],
) -> None:
    """Emit ``emit(place, tap)`` for the taps of some axes that read one phase."""
    if not classes:
        emit(at, tap)
        return
    line, *rest = classes
    inner = math.prod(other.count for other in rest)

    def one(i: Extent) -> None:
        _over_taps(layout, rest, pitches[1:], at + i * line.every * pitches[0], tap + i * inner, emit)

    if line.count == 1 or layout.inner * line.count * inner <= _FEW_PRODUCTS:
        for i in range(line.count):
            one(i)
        return
    with T.serial(line.count) as i:
        one(i)
