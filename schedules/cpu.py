"""Schedule rules for CPU kernels: contractions, row reductions, elementwise.

The rules use TVM's schedule primitives only, which refuse a change of meaning; a rule that is refused gives way to
the next, and the last resort is the function as it was.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm.s_tir.schedule import LoopRV, SBlockRV, Schedule
from tvm.s_tir.schedule.schedule import ScheduleError

from .analysis import BlockView, calls_math, view

#: Fewer scalar operations than this are not worth waking the thread pool (about 5 us).
PARALLEL_MIN_OPS = 1 << 16
#: From this many rows on, copying an operand into contiguous panels pays.
PACK_MIN_ROWS = 16
#: Stands for a symbolic extent where work is estimated (elements).
ASSUMED_EXTENT = 64


@dataclass(frozen=True)
class Machine:
    """What the rules need to know of a CPU.

    Attributes
    ----------
    vector_bytes : int
        Width of a vector register.
    registers : int
        Number of vector registers.
    """

    vector_bytes: int = 16
    registers: int = 16

    @staticmethod
    def of(target: tvm.target.Target) -> Machine:
        """Read vector width and register count off a target's features, triple and ``mcpu``."""
        attrs = target.attrs
        triple, mcpu = str(attrs.get("mtriple", "")), str(attrs.get("mcpu", ""))
        flags = " ".join(str(flag) for flag in attrs.get("mattr", ()))
        if attrs.get("feature.is_aarch64", False) or triple.startswith(("aarch64", "arm64")):
            return Machine(16, 32)
        if "avx512" in flags or mcpu in ("skylake-avx512", "icelake-server", "sapphirerapids", "znver4", "znver5"):
            return Machine(64, 32)
        if "avx2" in flags or mcpu.startswith(("haswell", "broadwell", "skylake", "znver", "alderlake", "core-avx2")):
            return Machine(32, 16)
        return Machine(16, 16)

    def lanes(self, dtype: str) -> int:
        """Return elements of ``dtype`` in one register."""
        return max(1, self.vector_bytes * 8 // tvm.DataType(dtype).bits)


def schedule(func: tvm.tirx.PrimFunc, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
    """Return ``func`` tiled, vectorized and parallel for ``target``, or as it was where no rule applies.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Schedulable (attribute ``s_tir``), of loop nests around single blocks; symbolic shapes allowed.
    target : tvm.target.Target
        An ``llvm`` or ``c`` target.
    """
    machine = Machine.of(target)
    for rule in (_contraction, _rows, _elementwise):
        sch = Schedule(func)
        try:
            if rule(sch, machine):
                return sch.mod["main"]
        except (ScheduleError, tvm.error.InternalError, RuntimeError, ValueError):
            continue
    return func


def _blocks(sch: Schedule) -> list[SBlockRV]:
    return list(sch.get_child_blocks(sch.get_sblock("root")))


def _inline(sch: Schedule) -> None:
    """Inline spatial producers, except costly ones read twice and those a contraction reads many times."""
    outputs = {sch.get(b).name_hint for b in sch.get_output_blocks(sch.get_sblock("root"))}
    for block in _blocks(sch):
        stage = view(sch, block)
        if not stage.spatial_only or sch.get(block).name_hint in outputs:
            continue
        consumers = sch.get_consumers(block)
        if any(view(sch, c).contraction for c in consumers):
            continue
        if calls_math(sch.get(block).body) and (len(consumers) > 1 or not view(sch, consumers[0]).spatial_only):
            continue
        try:
            sch.compute_inline(block)
        except ScheduleError:
            continue


def _extent(value: object) -> int | None:
    return int(value) if isinstance(value, tvm.tirx.IntImm) else None


def _ops(stage: BlockView) -> int:
    total = 1
    for axis in stage.axes:
        extent = _extent(axis.extent)
        total *= ASSUMED_EXTENT if extent is None else extent
    return total


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


def _divisor(extent: int | None, most: int) -> int:
    """Return the largest divisor of ``extent`` up to ``most``; 1 for a symbolic extent."""
    if extent is None:
        return 1
    return max((d for d in range(1, most + 1) if extent % d == 0), default=1)


def _spread(sch: Schedule, block: SBlockRV, machine: Machine) -> None:
    """Parallelize the outer loops and vectorize the inner one of a spatial block."""
    stage = view(sch, block)
    loops = list(sch.get_loops(block))
    if not loops:
        return
    parallel = _ops(stage) * (8 if calls_math(sch.get(block).body) else 1) >= PARALLEL_MIN_OPS
    lanes = machine.lanes(stage.dtype)
    inner = _extent(sch.get(loops[-1]).extent)
    if len(loops) == 1 or (inner is not None and inner < lanes):
        inner_loop: LoopRV = sch.fuse(*loops)
        outer: list[LoopRV] = []
    else:
        inner_loop, outer = loops[-1], loops[:-1]
    width = _divisor(_extent(sch.get(inner_loop).extent), 4 * lanes)
    if width >= min(lanes, 4):
        chunk, vector = sch.split(inner_loop, [None, width])
        sch.vectorize(vector)
    else:
        # LLVM's own vectorizer handles the remainder better than a predicate in each lane would.
        chunk = inner_loop
    if parallel:
        sch.parallel(sch.fuse(*outer, *([chunk] if not outer else [])))


def _elementwise(sch: Schedule, machine: Machine) -> bool:
    _inline(sch)
    done = False
    for block in _blocks(sch):
        if view(sch, block).spatial_only:
            _spread(sch, block, machine)
            done = True
        else:
            done = _spread_reduction(sch, block, machine) or done
    return done


def _spread_reduction(sch: Schedule, block: SBlockRV, machine: Machine) -> bool:
    stage = view(sch, block)
    loops = list(sch.get_loops(block))
    outer = loops[: stage.leading_spatial]
    if not outer or _ops(stage) < PARALLEL_MIN_OPS:
        return False
    sch.parallel(sch.fuse(*outer))
    return True


def _rows(sch: Schedule, machine: Machine) -> bool:
    """Softmax, norms, means: one parallel loop over rows, everything of a row computed inside it."""
    _inline(sch)
    blocks = _blocks(sch)
    stages = [view(sch, block) for block in blocks]
    reductions = [stage for stage in stages if not stage.spatial_only]
    if not reductions or any(stage.contraction for stage in reductions):
        return False
    if len(sch.get_output_blocks(sch.get_sblock("root"))) != 1:
        return False
    rows = min([stage.leading_spatial for stage in reductions] + [len(stages[-1].axes)])
    if rows == 0:
        return False
    parallel = sum(_ops(stage) for stage in stages) * 4 >= PARALLEL_MIN_OPS
    if len(blocks) == 1 and not stages[0].spatial_only:
        # A lone reduction writes the output itself: give it a row to be computed in.
        sch.cache_write(blocks[0], 0, "global")
        blocks = _blocks(sch)
    for block in blocks[:-1]:
        stage = view(sch, block)
        if not stage.spatial_only and stage.reads_reduced_axis_last:
            _split_sum(sch, block, machine)
    blocks = _blocks(sch)
    last = blocks[-1]
    row = sch.fuse(*list(sch.get_loops(last))[:rows])
    for block in reversed(blocks[:-1]):
        sch.compute_at(block, row, preserve_unit_loops=True)
    if parallel:
        sch.parallel(row)
    for block in blocks:
        _vectorize_inner(sch, block, row, machine)
    return True


def _split_sum(sch: Schedule, block: SBlockRV, machine: Machine) -> None:
    """Sum in as many lanes as four registers hold, then across the lanes."""
    stage = view(sch, block)
    loops = list(sch.get_loops(block))
    reduced = loops[stage.leading_spatial :]
    if len(reduced) != len(stage.axes) - stage.leading_spatial:
        return
    inner = sch.fuse(*reduced)
    extent = _extent(sch.get(inner).extent)
    width = _divisor(extent, 4 * machine.lanes(stage.dtype))
    if extent is None or width < 4 or width == extent:
        return
    _, lane = sch.split(inner, [None, width])
    sch.rfactor(lane, stage.leading_spatial)


def _vectorize_inner(sch: Schedule, block: SBlockRV, row: LoopRV, machine: Machine) -> None:
    stage = view(sch, block)
    loops = list(sch.get_loops(block))
    at = next(i for i, loop in enumerate(loops) if sch.get(loop).same_as(sch.get(row)))
    inside = loops[at + 1 :]
    kinds = sch.get(block).iter_vars
    if not inside:
        return
    try:
        if stage.spatial_only:
            inner = inside[-1]
            width = _divisor(_extent(sch.get(inner).extent), 4 * machine.lanes(stage.dtype))
            if width >= 4:
                sch.vectorize(sch.split(inner, [None, width])[1])
        elif "_rf" in sch.get(block).name_hint and kinds:
            lane = _lane_loop(sch, block, inside)
            if lane is None:
                return
            rest = [loop for loop in inside if not sch.get(loop).same_as(sch.get(lane))]
            sch.reorder(*rest, lane)
            sch.vectorize(lane)
            sch.decompose_reduction(block, rest[0])
    except ScheduleError:
        return


def _lane_loop(sch: Schedule, block: SBlockRV, inside: list[LoopRV]) -> LoopRV | None:
    """Return the loop among ``inside`` that is a lane of the split sum (bound to a spatial axis of more than 1)."""
    stage = view(sch, block)
    for loop in reversed(inside):
        var = sch.get(loop).loop_var
        if any(axis.spatial and axis.bound_to(var) for axis in stage.axes):
            extent = _extent(sch.get(loop).extent)
            if extent is not None and extent > 1:
                return loop
    return None


def _contraction(sch: Schedule, machine: Machine) -> bool:
    """Matmul and convolution: register tiles, a packed panel of the operand that the vector axis runs along."""
    _inline(sch)
    blocks = _blocks(sch)
    found = [block for block in blocks if view(sch, block).contraction]
    if len(found) != 1:
        return False
    block = found[0]
    stage = view(sch, block)
    consumers = list(sch.get_consumers(block))
    if len(consumers) == 1 and view(sch, consumers[0]).matches_output_of(stage):
        tail = consumers[0]
    else:
        tail = sch.cache_write(block, 0, "global")
    spatial = [axis for axis in stage.axes if axis.spatial]
    if not spatial:
        return False
    lanes = machine.lanes(stage.dtype)
    column = len(spatial) - 1
    row = stage.row_axis(column)
    n = _extent(spatial[column].extent)
    wide = (4 if machine.registers >= 32 else 2) * lanes
    width = _divisor(n, wide)
    # A predicate in each lane would undo vectorizing, so a ragged or symbolic row of columns stays one plain
    # loop, which LLVM vectorizes with a remainder of its own.
    ragged = n is None or width < min(lanes, n)
    height = 1
    if ragged or (row is not None and not _affine(spatial[row].extent)):
        row = None
    if row is not None:
        m = _extent(spatial[row].extent)
        height = 4 if m is None else _divisor(m, 6)
        if m is not None and height < 3 and m > 6:
            height = 4
    loops = list(sch.get_loops(tail))
    if len(loops) != len(spatial):
        return False
    columns, lane = sch.split(loops[column], [1, None] if ragged else [None, width])
    outer = [loop for i, loop in enumerate(loops) if i not in (row, column)]
    inner = [lane]
    tiles: list[LoopRV] = []
    if row is not None:
        tile, line = sch.split(loops[row], [None, height])
        tiles, inner = [tile], [line, lane]
    sch.reorder(*outer, columns, *tiles, *inner)
    panel = sch.fuse(*outer, columns)
    sch.compute_at(block, tiles[0] if tiles else panel, preserve_unit_loops=True)
    if not ragged and row is not None and (_extent(spatial[row].extent) or ASSUMED_EXTENT) >= PACK_MIN_ROWS:
        _pack(sch, block, stage, column, panel, lanes)
    depth = len(sch.get_loops(block)) - len(stage.axes)
    body = list(sch.get_loops(block))[depth:]
    chosen = [i for i in (row, column) if i is not None]
    others = [loop for i, loop in enumerate(body[: len(spatial)]) if i not in chosen]
    reduced = body[len(spatial) :]
    sch.reorder(*others, *reduced, *[body[i] for i in chosen])
    # A sum split into init and update is no longer provably parallel to TVM, so it is split last.
    if _ops(stage) >= PARALLEL_MIN_OPS:
        sch.parallel(panel)
    for part in (block, tail):
        nest = list(sch.get_loops(part))
        if not ragged:
            sch.vectorize(nest[-1])
        if row is not None:
            sch.unroll(nest[-2])
    sch.decompose_reduction(block, reduced[0])
    for other in blocks:
        if other is not block and other is not tail and view(sch, other).spatial_only:
            if not sch.get(other).name_hint == sch.get(tail).name_hint:
                _spread(sch, other, machine)
    return True


def _pack(sch: Schedule, block: SBlockRV, stage: BlockView, column: int, panel: LoopRV, lanes: int) -> None:
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
    loops = list(sch.get_loops(copy))
    if at == dims - 1:
        width = _divisor(_extent(sch.get(loops[-1]).extent), 4 * lanes)
        if width >= min(lanes, 4):
            sch.vectorize(sch.split(loops[-1], [None, width])[1])
