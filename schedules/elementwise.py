"""The rule for what no other rule takes: elementwise work, transposes, reductions one by one."""

from __future__ import annotations

from tvm.s_tir.schedule import SBlockRV, Schedule

from .analysis import view
from .machine import Machine
from .rows import reduce_columns
from .steps import PARALLEL_MIN_WORK, blocks_of, inline_producers, spread, static, work

#: Rows and columns of a transposed tile; a cache line of float32 is 16.
TILE = 16
#: Smaller transposes fit the first-level cache anyhow (elements).
TILE_MIN = 1 << 12


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
    """Copy tile by tile where an operand is contiguous along another axis than the result."""
    stage = view(sch, block)
    axis = stage.crossed_axis
    loops = list(sch.get_loops(block))
    if axis is None or len(loops) != len(stage.axes):
        return False
    extents = [static(sch.get(loop).extent) for loop in loops]
    if any(extent is None for extent in extents) or (extents[axis] or 0) * (extents[-1] or 0) < TILE_MIN:
        return False
    tile, line = sch.split(loops[axis], [None, TILE])
    columns, lane = sch.split(loops[-1], [None, TILE])
    outer = [loop for i, loop in enumerate(loops[:-1]) if i != axis]
    sch.reorder(*outer, tile, columns, line, lane)
    if work(sch, block, machine) * machine.lanes(stage.dtype) >= PARALLEL_MIN_WORK:
        sch.parallel(sch.fuse(*outer, tile))
    return True
