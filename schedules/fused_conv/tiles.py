"""Tiles of one piece of work: which there are, in which order sums are made, and what is done to them at last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..steps import CHUNK_REGISTERS
from ..writing import cast
from .layout import Expr, Layout, bound, ceildiv, least
from .plan import split
from .products import Tile, add_products, each_vector
from .spec import Extent


class TileWriter:
    """Emits the sums of one group's channels for the places of a piece.

    Parameters
    ----------
    layout : Layout
    copy, weight, operands, result
        Buffers; those of the result's shape as rows of its channels.
    batch, planes, group, share, first : tvm.ir.Expr
        Which piece.
    count : int or tvm.ir.Expr
        Rows in it, or places where there is one axis.
    """

    def __init__(
        self,
        layout: Layout,
        copy: Any,
        weight: Any,
        operands: Sequence[Any],
        result: Any,
        batch: Expr,
        planes: Sequence[Expr],
        group: Expr,
        share: Expr,
        first: Expr,
        count: Extent,
    ) -> None:
        self.layout, self.copy, self.weight = layout, copy, weight
        self.operands, self.result = operands, result
        self.batch, self.group = batch, group
        cut, width = layout.cut, layout.width
        plane: Expr = tirx.const(0, "int32")
        for index, extent in zip(planes, layout.planes):
            plane = plane * extent + index
        row = first if layout.flat else (plane * layout.height + first) * width
        self.rows: Extent = count
        self.columns: Extent = width
        if layout.flat or layout.joined:
            self.rows, self.columns = 1, count if layout.flat else bound(count * width)
        self.start = T.bind(row)
        # A loop over channels needs sums in memory: an index that is not a number would keep them out of registers.
        self.in_memory = cut.block > 1 or cut.depth < layout.inner or any(step.is_costly for step in layout.spec.steps)
        # Where the piece begins in what is read.
        self.source: Extent = 0
        if cut.direct:
            channel = batch * layout.spec.channels + group * layout.inner
            self.source = T.bind(channel * layout.plane + first)
        self.begin = T.bind(share * cut.share)
        self.blocks: Extent = cut.share
        if cut.blocks % cut.share:
            self.blocks = T.bind(tirx.min(cut.blocks - self.begin, cut.share))

    # Loops -------------------------------------------------------------------------------------------------------

    def _over_blocks(self, emit: Callable[[Expr, Expr], None]) -> None:
        """Emit ``emit(number, block)`` for the share's blocks of output channels."""
        with T.serial(self.blocks) as i:
            emit(i, T.bind(self.begin + i))

    def _over_depth(self, emit: Callable[[Expr, Extent], None]) -> None:
        """Emit ``emit(channel, count)`` for stretches of the input channels."""
        inner, depth = self.layout.inner, self.layout.cut.depth
        with T.serial(-(-inner // depth)) as part:
            channel = T.bind(part * depth)
            emit(channel, T.bind(tirx.min(inner - channel, depth)) if inner % depth else depth)

    def _kinds(self, extent: Extent, most: int, unit: int) -> list[tuple[int, Extent]]:
        """Return how large tiles are along an axis, and how many of each there are."""
        if isinstance(extent, int):
            units = -(-extent // unit)
            return [kind for kind in split(units, min(most, units)) if kind[1]]
        return [(most, ceildiv(extent, most * unit))]

    def _over_tiles(self, emit: Callable[[Tile], None]) -> None:
        """Emit the tiles of the piece; those at the end begin earlier instead of being smaller."""
        layout = self.layout
        tall = self._kinds(self.rows, layout.cut.rows, 1)
        wide = self._kinds(self.columns, layout.cut.vectors, layout.lanes)
        per_row = sum(number for _, number in wide)
        above: Extent = 0
        over: Extent = 0
        for rows, number_of_rows in tall:
            with T.serial(number_of_rows) as i:
                row = bound(above + i * rows)
                left: Extent = 0
                before: Extent = 0
                for vectors, number in wide:
                    width = vectors * layout.lanes
                    valid = bound(least(width, self.columns))
                    with T.serial(number) as j:
                        column = T.bind(tirx.min(left + j * width, self.columns - valid))
                        where = T.bind(self.source + row * layout.pitch + column)
                        target = T.bind(self.start + row * layout.width + column)
                        emit(Tile((over + i) * per_row + before + j, where, target, rows, vectors, valid))
                    left, before = left + number * width, before + number
            above, over = above + number_of_rows * rows, over + number_of_rows

    def _count(self) -> Extent:
        """Return the number of tiles."""
        layout = self.layout
        tall = self._kinds(self.rows, layout.cut.rows, 1)
        wide = self._kinds(self.columns, layout.cut.vectors, layout.lanes)
        return sum(number for _, number in tall) * sum(number for _, number in wide)

    # Sums --------------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Emit the sums, and what is done to them."""
        cut, lanes = self.layout.cut, self.layout.lanes
        if cut.depth >= self.layout.inner:
            if cut.blocks_first:
                self._over_blocks(lambda _, block: self._over_tiles(lambda tile: self._whole(tile, block)))
            else:
                self._over_tiles(lambda tile: self._over_blocks(lambda _, block: self._whole(tile, block)))
        elif cut.blocks_first:
            tiles = bound(self._count())
            down = self._down(cut.share * tiles)

            def over(emit: Callable[[Tile, Expr, Expr], None]) -> None:
                self._over_blocks(
                    lambda i, block: self._over_tiles(lambda tile: emit(tile, block, i * tiles + tile.number))
                )

            self._over_depth(
                lambda channel, depth: over(lambda tile, block, at: self._part(down, at, tile, block, channel, depth))
            )
            over(lambda tile, block, at: self._finish(lambda v, lane: down[at, v * lanes + lane], tile, block))
        else:
            self._over_tiles(self._in_parts)

    def _in_parts(self, tile: Tile) -> None:
        """Sum up one tile of all output channels, some input channels at a time."""
        down, lanes = self._down(self.layout.cut.share), self.layout.lanes
        self._over_depth(
            lambda channel, depth: self._over_blocks(lambda i, block: self._part(down, i, tile, block, channel, depth))
        )
        self._over_blocks(lambda i, block: self._finish(lambda v, lane: down[i, v * lanes + lane], tile, block))

    def _down(self, places: Extent) -> Any:
        """Return where sums are put down between stretches of the input channels, set to zero."""
        layout = self.layout
        size, lanes = layout.cut.block * layout.cut.rows * layout.cut.vectors, layout.lanes
        down = T.alloc_buffer((places, size * lanes), layout.sums, layout=None)
        with T.serial(places) as i, T.serial(size) as v, T.vectorized(lanes) as lane:
            T.buffer_store(down, tirx.const(0.0, layout.sums), [i, v * lanes + lane])
        return down

    def _sums(self, tile: Tile) -> Any:
        shape = (self.layout.cut.block * tile.count, self.layout.lanes)
        return T.alloc_buffer(shape, self.layout.sums, scope="local", layout=None)

    def _whole(self, tile: Tile, block: Expr) -> None:
        """Sum up one tile of one block of output channels, and store what is made of it."""
        layout = self.layout
        sums, zero = self._sums(tile), tirx.const(0.0, layout.sums)
        each_vector(layout, tile, lambda at, lane: T.buffer_store(sums, zero, [at, lane]))
        self._add(sums, tile, block, 0, layout.inner)
        if not self.in_memory:
            self._finish(lambda v, lane: sums[v, lane], tile, block)
            return
        lanes = layout.lanes
        done = T.alloc_buffer((layout.cut.block * tile.count * lanes,), layout.sums, scope="local", layout=None)
        each_vector(layout, tile, lambda at, lane: T.buffer_store(done, sums[at, lane], [at * lanes + lane]))
        self._finish(lambda v, lane: done[v * lanes + lane], tile, block)

    def _part(self, down: Any, place: Expr, tile: Tile, block: Expr, channel: Expr, depth: Extent) -> None:
        """Add some input channels to sums that were put down."""
        layout, sums, lanes = self.layout, self._sums(tile), self.layout.lanes
        each_vector(layout, tile, lambda v, lane: T.buffer_store(sums, down[place, v * lanes + lane], [v, lane]))
        self._add(sums, tile, block, channel, depth)
        each_vector(layout, tile, lambda v, lane: T.buffer_store(down, sums[v, lane], [place, v * lanes + lane]))

    def _add(self, sums: Any, tile: Tile, block: Expr, channel: Extent, depth: Extent) -> None:
        def weight(tap: Extent, channel: Extent, o: int) -> Expr:
            return self.weight[self.group, block, tap, channel, o]

        add_products(self.layout, sums, self.copy, weight, tile, channel, depth)

    # Results -----------------------------------------------------------------------------------------------------

    def _finish(self, value: Callable[[Expr, Expr], Expr], tile: Tile, block: Expr) -> None:
        """Do the steps to a tile's sums, ``value(vector, lane)``, and store them."""
        layout = self.layout
        first = T.bind(block * layout.cut.block)
        channels: Extent = layout.cut.block
        if layout.outputs % layout.cut.block:
            channels = T.bind(tirx.min(layout.outputs - first, layout.cut.block))
        if layout.cut.block == 1:
            self._channel(value, tile, 0, T.bind(self.group * layout.outputs + first))
            return
        with T.serial(channels) as o:
            self._channel(value, tile, o * tile.count, T.bind(self.group * layout.outputs + first + o))

    def _channel(self, value: Callable[[Expr, Expr], Expr], tile: Tile, at: Extent, out: Expr) -> None:
        """Finish the rows of one output channel, whose first vector is ``at``."""
        lanes, wide = self.layout.lanes, tile.vectors * self.layout.lanes

        def vectors(at: Extent, target: Expr, valid: int) -> None:
            # Several registers at a time: a function of one value has many steps that wait for each other.
            most = CHUNK_REGISTERS if self.in_memory else 1
            done = 0
            while done < valid:
                count = min(valid - done, most * lanes)
                count = count // lanes * lanes or count
                with T.vectorized(count) as lane:
                    self._store(value(at + done // lanes, lane), out, target + done + lane)
                done += count

        for row in range(tile.rows):
            first, target = at + row * tile.vectors, tile.target + row * self.layout.width
            if isinstance(tile.valid, int):
                vectors(first, target, tile.valid)
                continue
            with T.If(tile.valid == wide):
                with T.Then():
                    vectors(first, target, wide)
                with T.Else(), T.serial(tile.valid) as i:
                    v, lane = tirx.floordiv(i, lanes), tirx.floormod(i, lanes)
                    self._store(value(first + v, lane), out, target + i)

    def _store(self, value: Expr, out: Expr, place: Expr) -> None:
        layout = self.layout
        for step, operand in zip(layout.spec.steps, self.operands):
            given = None
            if step.takes:
                index = (out,) if step.takes == "channels" else (self.batch, out, place)
                given = cast(operand[index], layout.sums)
            value = step.apply(value, given)
        T.buffer_store(self.result, cast(value, layout.spec.dtype), [self.batch, out, place])
