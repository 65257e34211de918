"""The rule for matrix products and convolutions: register tiles over packed panels, padded where sizes don't divide."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm.s_tir.schedule import LoopRV, SBlockRV, Schedule
from tvm.s_tir.schedule.schedule import ScheduleError

from .analysis import BlockView, view
from .machine import Machine
from .steps import (
    ASSUMED_EXTENT,
    PARALLEL_MIN_WORK,
    blocks_of,
    divisor,
    inline_producers,
    iterations,
    spread,
    static,
    vectorize_loop,
    work,
)

#: From this many rows on, copying an operand into contiguous panels pays.
PACK_MIN_ROWS = 16
#: Fewer products than this are not worth padded copies of the operands.
PAD_MIN_PRODUCTS = 1 << 10


@dataclass(frozen=True)
class Tile:
    """A register tile.

    Attributes
    ----------
    row, column : int
        Spatial axes of the tile; row is None where no axis uses the columns' operand again.
    height, width : int
        Rows and columns; a width of 0 leaves the columns one plain loop, which LLVM vectorizes with a remainder of
        its own.
    pad_rows, pad_columns : bool
        Whether operands are copied into buffers of whole tiles.
    """

    row: int | None
    column: int
    height: int
    width: int
    pad_rows: bool = False
    pad_columns: bool = False


def contraction(sch: Schedule, machine: Machine) -> bool:
    """Schedule a function around one sum of products."""
    inline_producers(sch)
    blocks = blocks_of(sch)
    found = [block for block in blocks if view(sch, block).contraction]
    if len(found) != 1:
        return False
    block = found[0]
    stage = view(sch, block)
    if not any(axis.spatial for axis in stage.axes):
        return False
    tile = _choose(stage, machine)
    if tile.pad_rows or tile.pad_columns:
        try:
            _pad(sch, block, stage, tile)
        except ScheduleError:
            tile = _choose(stage, machine, padding=False)
    tail = _tail(sch, block)
    parallel = work(sch, block, machine) >= PARALLEL_MIN_WORK
    for other in blocks_of(sch):
        mine = any(sch.get(other).same_as(sch.get(part)) for part in (block, tail))
        if not mine and view(sch, other).spatial_only:
            spread(sch, other, machine)
    if tile.row is None or not tile.width:
        _thin(sch, block, tail, tile, parallel)
    else:
        _tiled(sch, block, tail, tile, machine, parallel)
    return True


def _choose(stage: BlockView, machine: Machine, padding: bool = True) -> Tile:
    """Choose the tile that wastes least and fills the registers."""
    spatial = [axis for axis in stage.axes if axis.spatial]
    lanes = machine.lanes(stage.dtype)
    column = len(spatial) - 1
    n = static(spatial[column].extent)
    most = 4 if machine.registers >= 32 else 2
    row = stage.row_axis(column)
    shared = row is not None
    if row is None and len(spatial) > 1 and stage.operand_of(column) is not None:
        # A depthwise convolution uses no operand again, but sums that do not wait for each other hide latency.
        row = column - 1 if (static(spatial[column - 1].extent) or 2) > 1 else None
        if stage.plain:
            row = None
    padding = padding and stage.plain and shared and iterations(stage) >= PAD_MIN_PRODUCTS
    whole = next((k * lanes for k in range(most, 0, -1) if n is not None and n % (k * lanes) == 0), 0)
    small = n if n is not None and n < lanes else 0
    width, pad_columns = whole or small, False
    if not width and padding:
        width, pad_columns = (most if n is None or n > lanes else 1) * lanes, True
        if n is not None:
            width = min((k * lanes for k in range(1, most + 1)), key=lambda w: (-(-n // w) * w, -w))
    if not width and n is not None:
        # A whole line of a picture is one vector of several registers, the last one not full.
        width = n if n <= 4 * lanes else divisor(n, most * lanes)
        width = width if width >= lanes // 2 else 0
    if row is None:
        return Tile(None, column, 1, width)
    m = static(spatial[row].extent)
    # As many sums as leave registers for the operands.
    tallest = max(1, min(6, (machine.registers - machine.registers // 4) // max(1, -(-width // lanes))))
    height = min(4, tallest) if m is None else divisor(m, tallest)
    pad_rows = False
    if m is None or (height < min(3, tallest) and m > 3):
        heights = range(tallest, max(1, tallest - 3), -1)
        height = min(4, tallest) if m is None else min(heights, key=lambda h: (-(-m // h) * h, -h))
        pad_rows = padding
        if not _affine(spatial[row].extent):
            return Tile(None, column, 1, 0 if pad_columns else width)
    return Tile(row, column, height, width, pad_rows, pad_columns)


def _affine(extent: object) -> bool:
    """Return whether an extent is made of sums and products only.

    TVM bounds the buffer of a tile over ``min``/``max`` extents (an ONNX Slice's) by their constants, which can be
    2**31 rows.
    """
    stack = [extent]
    while stack:
        node = stack.pop()
        if isinstance(node, (tvm.tirx.Add, tvm.tirx.Sub, tvm.tirx.Mul)):
            stack += [node.a, node.b]
        elif not isinstance(node, (tvm.tirx.Var, tvm.tirx.IntImm)):
            return False
    return True


def _pad(sch: Schedule, block: SBlockRV, stage: BlockView, tile: Tile) -> None:
    """Copy operands into zero-padded buffers of whole tiles; the result is copied back, or into the epilogue."""
    multiples = [1] * len(stage.axes)
    spatial = [i for i, axis in enumerate(stage.axes) if axis.spatial]
    if tile.pad_columns:
        multiples[spatial[tile.column]] = tile.width
    if tile.pad_rows and tile.row is not None:
        multiples[spatial[tile.row]] = tile.height
    before = blocks_of(sch)
    sch.pad_einsum(block, multiples)
    for producer in sch.get_producers(block):
        # The copies that pad_einsum made, which it does not return.
        if not any(sch.get(producer).same_as(sch.get(other)) for other in before):
            sch.decompose_padding(producer, sch.get_loops(producer)[0])


def _tail(sch: Schedule, block: SBlockRV) -> SBlockRV:
    """Return the block that takes the result away: an epilogue, the copy out of a padded buffer, or one made here."""
    consumers = list(sch.get_consumers(block))
    if (
        len(consumers) == 1
        and view(sch, consumers[0]).spatial_only
        and view(sch, consumers[0]).plain_of(view(sch, block))
    ):
        copy = consumers[0]
        after = list(sch.get_consumers(copy))
        if len(after) == 1 and view(sch, after[0]).plain_of(view(sch, copy)) and view(sch, copy).is_copy:
            try:
                sch.compute_inline(copy)
                return after[0]
            except ScheduleError:
                pass
        return copy
    return sch.cache_write(block, 0, "global")


def _tiled(sch: Schedule, block: SBlockRV, tail: SBlockRV, tile: Tile, machine: Machine, parallel: bool) -> None:
    stage = view(sch, block)
    spatial = [axis for axis in stage.axes if axis.spatial]
    loops = list(sch.get_loops(block))
    reduced = loops[len(spatial) :]
    assert tile.row is not None
    columns, lane = sch.split(loops[tile.column], [None, tile.width])
    rows, line = sch.split(loops[tile.row], [None, tile.height])
    outer = [loop for i, loop in enumerate(loops[: len(spatial)]) if i not in (tile.row, tile.column)]
    sch.reorder(*outer, columns, rows, *reduced, line, lane)
    panel = sch.fuse(*outer, columns)
    height = static(spatial[tile.row].extent) or ASSUMED_EXTENT
    if stage.row_axis(tile.column) is not None and height >= PACK_MIN_ROWS and not tile.pad_columns:
        _pack(sch, block, stage, tile.column, panel, machine)
    # Where columns are padded, an epilogue in the tile would test each lane; it runs over the whole result instead.
    inside = not tile.pad_columns
    if inside:
        sch.reverse_compute_at(tail, rows, preserve_unit_loops=True)
    # A sum split into init and update is no longer provably parallel to TVM, so it is split last.
    if parallel:
        sch.parallel(panel)
    for part in (block, tail) if inside else (block,):
        nest = list(sch.get_loops(part))
        sch.vectorize(nest[-1])
        sch.unroll(nest[-2])
    if not inside:
        spread(sch, tail, machine)
    sch.decompose_reduction(block, reduced[0])


def _thin(sch: Schedule, block: SBlockRV, tail: SBlockRV, tile: Tile, parallel: bool) -> None:
    """One row at a time: a product with a vector, or columns of unknown number."""
    stage = view(sch, block)
    count = sum(axis.spatial for axis in stage.axes)
    loops = list(sch.get_loops(tail))
    columns = sch.split(loops[-1], [None, tile.width] if tile.width else [1, None])[0]
    panel = sch.fuse(*loops[:-1], columns)
    sch.compute_at(block, panel, preserve_unit_loops=True)
    body = list(sch.get_loops(block))[-len(stage.axes) :]
    sch.reorder(*body[: count - 1], *body[count:], body[count - 1])
    if parallel:
        sch.parallel(panel)
    if tile.width:
        for part in (block, tail):
            sch.vectorize(list(sch.get_loops(part))[-1])
    sch.decompose_reduction(block, body[count])


def _pack(sch: Schedule, block: SBlockRV, stage: BlockView, column: int, panel: LoopRV, machine: Machine) -> None:
    """Copy the operand of the vector axis into a contiguous panel, once for all row tiles."""
    index = stage.operand_of(column)
    if index is None:
        return
    copy = sch.cache_read(block, index, "global")
    dims = stage.operand_dims(index)
    at = stage.position_in_operand(index, column)
    if at is not None and at != dims - 1:
        order = [i for i in range(dims) if i != at] + [at]
        sch.transform_layout(
            copy, ("write", 0), lambda *axes: [axes[i] for i in order], assume_injective_transform=True
        )
    sch.compute_at(copy, panel, preserve_unit_loops=True)
    if at == dims - 1:
        vectorize_loop(sch, list(sch.get_loops(copy))[-1], machine.lanes(stage.dtype))
