"""The rule for softmax, norms and other reductions: everything of a row inside one loop over rows."""

from __future__ import annotations

from tvm.s_tir.schedule import LoopRV, SBlockRV, Schedule
from tvm.s_tir.schedule.schedule import ScheduleError

from .analysis import BlockView, view
from .machine import Machine
from .steps import PARALLEL_MIN_WORK, blocks_of, inline_producers, static, vectorize_loop, work


def rows(sch: Schedule, machine: Machine) -> bool:
    """Compute all stages of a row inside one loop over rows, sums and maxima in as many lanes as fit."""
    inline_producers(sch)
    blocks = blocks_of(sch)
    stages = [view(sch, block) for block in blocks]
    reductions = [stage for stage in stages if not stage.spatial_only]
    if not reductions or any(stage.contraction for stage in reductions):
        return False
    if len(sch.get_output_blocks(sch.get_sblock("root"))) != 1:
        return False
    leading = _common_rows(stages)
    if leading == 0:
        return False
    parallel = sum(work(sch, block, machine) for block in blocks) >= PARALLEL_MIN_WORK
    if not stages[-1].spatial_only:
        # A reduction that writes the output itself is given a row to be computed in.
        sch.cache_write(blocks[-1], 0, "global")
        blocks = blocks_of(sch)
    partial: list[SBlockRV] = []
    for block in blocks[:-1]:
        stage = view(sch, block)
        if not stage.spatial_only and stage.reads_reduced_axis_last:
            partial += _split_sum(sch, block, machine)
    blocks = blocks_of(sch)
    last = blocks[-1]
    row = sch.fuse(*list(sch.get_loops(last))[:leading])
    for block in reversed(blocks[:-1]):
        sch.compute_at(block, row, preserve_unit_loops=True)
    if parallel:
        sch.parallel(row)
    for block in blocks:
        in_lanes = any(sch.get(block).same_as(sch.get(other)) for other in partial)
        _vectorize_inner(sch, block, row, machine, in_lanes)
    return True


def _common_rows(stages: list[BlockView]) -> int:
    """Return how many leading axes all stages share, each a row of its own in every stage.

    A stage that indexes a reduction's result by other than its own leading axes (softmax over a middle axis) would
    have the reduction computed again for every one of them.
    """
    reductions = [stage for stage in stages if not stage.spatial_only]
    count = min([stage.leading_spatial for stage in reductions] + [len(stages[-1].axes)])
    if not stages[-1].spatial_only:
        count = min(count, stages[-1].leading_spatial)
    for stage in reductions:
        # Along the axis that its operand is contiguous in it is computed in vectors, inside the row.
        if stage.contiguous_columns and stage.leading_spatial > 1:
            count = min(count, stage.leading_spatial - 1)
    for stage in stages:
        for other in reductions:
            count = min([count, *stage.leading_indices_of(other)])
    return count


def _split_sum(sch: Schedule, block: SBlockRV, machine: Machine) -> list[SBlockRV]:
    """Sum in as many lanes as four registers hold, then across the lanes; return the block of the lanes, if any."""
    stage = view(sch, block)
    loops = list(sch.get_loops(block))
    reduced = loops[stage.leading_spatial :]
    if len(reduced) != len(stage.axes) - stage.leading_spatial:
        return []
    inner = sch.fuse(*reduced)
    extent = static(sch.get(inner).extent)
    lanes = machine.lanes(stage.dtype)
    choices = [n * lanes for n in (4, 3, 2, 1)] + list(range(lanes - 1, 3, -1))
    width = next((w for w in choices if extent is not None and extent % w == 0 and extent > w), 0)
    if not width:
        return []
    _, lane = sch.split(inner, [None, width])
    return [sch.rfactor(lane, stage.leading_spatial)]


def _vectorize_inner(sch: Schedule, block: SBlockRV, row: LoopRV, machine: Machine, in_lanes: bool) -> None:
    """Vectorize what a block does in a row; ``in_lanes`` says that it is the partial sum of :func:`_split_sum`."""
    stage = view(sch, block)
    loops = list(sch.get_loops(block))
    at = next((i for i, loop in enumerate(loops) if sch.get(loop).same_as(sch.get(row))), None)
    if at is None:
        return  # computed outside of the rows: its loops stay as they are
    inside = loops[at + 1 :]
    if not inside:
        return
    try:
        if stage.spatial_only:
            vectorize_loop(sch, inside[-1], machine.lanes(stage.dtype))
        elif in_lanes:
            lane = _lane_loop(sch, block, inside)
            if lane is None:
                return
            rest = [loop for loop in inside if not sch.get(loop).same_as(sch.get(lane))]
            if not rest:
                return
            sch.reorder(*rest, lane)
            sch.vectorize(lane)
            sch.decompose_reduction(block, rest[0])
        elif stage.contiguous_columns:
            reduce_columns(sch, block, inside, machine)
    except ScheduleError:
        return


def _lane_loop(sch: Schedule, block: SBlockRV, inside: list[LoopRV]) -> LoopRV | None:
    """Return the loop among ``inside`` that is a lane of the split sum (bound to a spatial axis of more than 1)."""
    stage = view(sch, block)
    for loop in reversed(inside):
        var = sch.get(loop).loop_var
        if any(axis.spatial and axis.bound_to(var) for axis in stage.axes):
            extent = static(sch.get(loop).extent)
            if extent is not None and extent > 1:
                return loop
    return None


def reduce_columns(
    sch: Schedule, block: SBlockRV, inside: list[LoopRV], machine: Machine, parallel: bool = False
) -> bool:
    """Sum along an outer axis in vectors along the contiguous one: ``for rows: for lanes: total += ...``."""
    stage = view(sch, block)
    column = max(i for i, axis in enumerate(stage.axes) if axis.spatial)

    def bound(loop: LoopRV, axes: list[int]) -> bool:
        var = sch.get(loop).loop_var
        return any(stage.axes[i].bound_to(var) for i in axes)

    reduced = [loop for loop in inside if bound(loop, [i for i, axis in enumerate(stage.axes) if not axis.spatial])]
    lane = next((loop for loop in inside if bound(loop, [column])), None)
    if lane is None or not reduced:
        return False
    others = [loop for loop in inside if not any(sch.get(loop).same_as(sch.get(x)) for x in (lane, *reduced))]
    lanes = machine.lanes(stage.dtype)
    extent = static(sch.get(lane).extent)
    width = next((n * lanes for n in (4, 3, 2, 1) if extent is not None and extent % (n * lanes) == 0), 0)
    if width:
        chunk, vector = sch.split(lane, [None, width])
        sch.reorder(*others, chunk, *reduced, vector)
        outer = [*others, chunk]
    else:
        vector, outer = lane, others
        sch.reorder(*others, *reduced, vector)
    if parallel and outer:
        sch.parallel(sch.fuse(*outer))
    if width:
        sch.vectorize(vector)
    sch.decompose_reduction(block, reduced[0])
    return True
