"""Steps that several schedule rules share: inlining, sizes, work, loops that spread over lanes and threads."""

from __future__ import annotations

import tvm
from tvm.s_tir.schedule import LoopRV, SBlockRV, Schedule
from tvm.s_tir.schedule.schedule import ScheduleError

from .analysis import BlockView, calls_math, is_conditional, view
from .machine import Machine

#: Less work than this is not worth waking the thread pool (vector operations; some 20 us on one core).
PARALLEL_MIN_WORK = 1 << 17
#: Vector operations that a value costs which is loaded, changed and stored.
MOVED = 4
#: Vector operations that an intrinsic stands for.
COSTLY = 12
#: Registers that one turn of a vectorized loop fills, where the extent allows it.
CHUNK_REGISTERS = 4
#: Stands for a symbolic extent where work is estimated (elements).
ASSUMED_EXTENT = 64


def blocks_of(sch: Schedule) -> list[SBlockRV]:
    """Return the blocks under the root, in order."""
    return list(sch.get_child_blocks(sch.get_sblock("root")))


def inline_producers(sch: Schedule) -> None:
    """Inline spatial producers, except costly ones read twice and those a contraction reads many times."""
    outputs = list(sch.get_output_blocks(sch.get_sblock("root")))
    for block in blocks_of(sch):
        stage = view(sch, block)
        if not stage.spatial_only or any(sch.get(block).same_as(sch.get(output)) for output in outputs):
            continue
        consumers = sch.get_consumers(block)
        if not consumers:
            continue  # nothing reads it, so there is nothing to inline it into
        if any(view(sch, c).contraction for c in consumers):
            continue
        if calls_math(sch.get(block).body) and (len(consumers) > 1 or not view(sch, consumers[0]).spatial_only):
            continue
        try:
            sch.compute_inline(block)
        except ScheduleError:
            continue


def static(value: object) -> int | None:
    """Return an extent that is a number, else None."""
    return int(value) if isinstance(value, tvm.tirx.IntImm) else None


def iterations(stage: BlockView) -> int:
    """Return how often a block runs; symbolic extents count as ASSUMED_EXTENT."""
    total = 1
    for axis in stage.axes:
        extent = static(axis.extent)
        total *= ASSUMED_EXTENT if extent is None else extent
    return total


def work(sch: Schedule, block: SBlockRV, machine: Machine) -> int:
    """Return an estimate of a block's vector operations."""
    stage = view(sch, block)
    each = COSTLY if calls_math(sch.get(block).body) else 1
    return iterations(stage) * each * (MOVED if stage.spatial_only else 1) // machine.lanes(stage.dtype)


def divisor(extent: int | None, most: int) -> int:
    """Return the largest divisor of ``extent`` up to ``most``; 1 for a symbolic extent."""
    if extent is None:
        return 1
    return max((d for d in range(1, most + 1) if extent % d == 0), default=1)


def vectorize_loop(sch: Schedule, loop: LoopRV, lanes: int) -> tuple[LoopRV, bool]:
    """Vectorize a loop in chunks of up to CHUNK_REGISTERS registers, whole registers where possible.

    Returns
    -------
    tuple
        The loop over chunks and True; or the loop as it was and False where no chunk divides it: LLVM's own
        vectorizer handles the remainder better than a predicate in each lane would.
    """
    extent = static(sch.get(loop).extent)
    choices = range(CHUNK_REGISTERS * lanes, 0, -lanes)
    whole = next((n for n in choices if extent is not None and extent % n == 0), 0)
    width = whole or divisor(extent, lanes)
    if width < min(lanes, 4):
        return loop, False
    chunk, vector = sch.split(loop, [None, width])
    sch.vectorize(vector)
    return chunk, True


def start_sums(sch: Schedule) -> None:
    """Set the start of every sum or maximum whose extent may be 0 before its loops.

    TVM sets it in the first turn of the loop: of an empty sum that would leave what lay in memory.
    """
    for block in blocks_of(sch):
        if getattr(sch.get(block), "init", None) is None:
            continue
        reduced = [axis for axis in view(sch, block).axes if not axis.spatial]
        if all((static(axis.extent) or 0) > 0 for axis in reduced):
            continue
        for loop in sch.get_loops(block):
            if any(axis.bound_to(sch.get(loop).loop_var) for axis in reduced):
                sch.decompose_reduction(block, loop)
                break


def spread(sch: Schedule, block: SBlockRV, machine: Machine) -> None:
    """Parallelize the outer loops and vectorize the inner one of a spatial block."""
    stage = view(sch, block)
    loops = list(sch.get_loops(block))
    if not loops:
        return
    parallel = work(sch, block, machine) >= PARALLEL_MIN_WORK
    if is_conditional(sch.get(block).body):
        # Vectorized, the condition would be a branch in each lane.
        if parallel and len(loops) > 1:
            sch.parallel(sch.fuse(*loops[:-1]))
        return
    lanes = machine.lanes(stage.dtype)
    inner = static(sch.get(loops[-1]).extent)
    if len(loops) == 1 or (inner is not None and inner < lanes):
        inner_loop: LoopRV = sch.fuse(*loops)
        outer: list[LoopRV] = []
    else:
        inner_loop, outer = loops[-1], loops[:-1]
    chunk, _ = vectorize_loop(sch, inner_loop, lanes)
    if parallel:
        sch.parallel(sch.fuse(*outer, *([chunk] if not outer else [])))
