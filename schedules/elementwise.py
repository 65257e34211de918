"""The rule for what no other rule takes: elementwise work, transposes, reductions one by one."""

from __future__ import annotations

from tvm.s_tir.schedule import SBlockRV, Schedule

from .analysis import view
from .machine import Machine
from .rows import reduce_columns
from .steps import PARALLEL_MIN_WORK, blocks_of, inline_producers, iterations, spread, static, work

#: A transpose of more elements is divided over threads; it moves memory, which one core nearly fills.
TRANSPOSE_PARALLEL = 1 << 17
#: Ragged transposes gain from tiles only where a column's lines no longer stay in the cache.
RAGGED_TILE_MIN = 1 << 18


def elementwise(sch: Schedule, machine: Machine) -> bool:
    """Spread each block over lanes and threads by itself; a transpose in tiles that stay in the cache."""
    inline_producers(sch)
    done = False
    for block in blocks_of(sch):
        if not view(sch, block).spatial_only:
            done = _reduction(sch, block, machine) or done
            continue
        if not _tile_transpose(sch, block, machine):
            spread(sch, block, machine)
        done = True
    return done


def _reduction(sch: Schedule, block: SBlockRV, machine: Machine) -> bool:
    stage = view(sch, block)
    loops = list(sch.get_loops(block))
    parallel = work(sch, block, machine) >= PARALLEL_MIN_WORK
    if stage.contiguous_columns and not stage.contraction:
        return reduce_columns(sch, block, loops, machine, parallel)
    outer = loops[: stage.leading_spatial]
    if not outer or not parallel:
        return False
    sch.parallel(sch.fuse(*outer))
    return True


def _tile_transpose(sch: Schedule, block: SBlockRV, machine: Machine) -> bool:
    """Copy in square tiles of one register where an operand is contiguous along another axis than the result.

    A tile is read in vectors and written line by line: the other way round the reads would be gathers.
    """
    stage = view(sch, block)
    axis = stage.crossed_axis
    loops = list(sch.get_loops(block))
    if axis is None or len(loops) != len(stage.axes):
        return False
    lanes = machine.lanes(stage.dtype)
    extents = static(sch.get(loops[axis]).extent), static(sch.get(loops[-1]).extent)
    if extents[0] is None or extents[1] is None or lanes == 1:
        return False
    whole = extents[0] % lanes == 0 and extents[1] % lanes == 0
    if not whole and iterations(stage) < RAGGED_TILE_MIN:
        return False
    tile, line = sch.split(loops[axis], [None, lanes])
    columns, column = sch.split(loops[-1], [None, lanes])
    outer = [loop for i, loop in enumerate(loops[:-1]) if i != axis]
    sch.reorder(*outer, tile, columns, column, line)
    if iterations(stage) >= TRANSPOSE_PARALLEL:
        sch.parallel(sch.fuse(*outer, tile))
    if whole:
        sch.vectorize(line)
    return True
