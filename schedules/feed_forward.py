"""One kernel for a feed-forward block: norm or rotary, first layers, activation, gate; second layer, residual.

``result = residual + (activate(turn(norm(x)) @ gate) * (turn(norm(x)) @ up)) @ down``, each step there or not: two
fused linear layers, see :mod:`~crossloom.schedules.fused_linear`, of which the second takes the only result of the
first.  That one, the widest value of a block, never exists as a whole: rows are worked through in chunks, of which the
last-level cache holds what is between, and weights are read once a chunk by all threads together.  Between the layers
values are of the type of sums: those of float16 are rounded once less than by two kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .elementary import vectorizable_math
from .fused_linear import Plan, Spec, plan
from .fused_linear.kernel import Layer
from .fused_linear.operands import Expr, Frame, Operands, count
from .fused_linear.plan import rows_of
from .fused_linear.results import Results
from .fused_linear.rows import Rows
from .machine import Machine
from .writing import writing

#: Values between the layers that are there at a time: so many bytes, which the last-level cache holds,
CHUNK_BYTES = 1 << 20
#: or this share of the weights, which are read again for every chunk.  Measured: at a depth of 768 (19 MB of weights)
#: chunks of 100 rows cost 5%, of 384 rows nothing; at 384 (5 MB) chunks of 100 rows cost nothing.
WEIGHTS_SHARE = 4


@dataclass(frozen=True)
class FeedForward:
    """What a kernel computes.

    Attributes
    ----------
    first : Spec
        With one result: rows in their order, then lanes.
    second : Spec
        Its x is that result; it has a norm in front or not, and no rotation.

    Notes
    -----
    The kernel's arguments: those of the first layer but its result, then those of the second but its x.
    """

    first: Spec
    second: Spec

    @property
    def hidden(self) -> int:
        """Values of a row between the layers."""
        return self.second.depth


@dataclass(frozen=True)
class Cut:
    """How a kernel is cut.

    Attributes
    ----------
    first, second : Plan
        Of the layers; where the number of rows is known, of the rows of a chunk.
    step : int
        Chunks are multiples of so many rows.
    chunk : int
        Rows of a chunk; the most of them where the number of rows is symbolic.
    chunks : int or None
        None where the number of rows is symbolic.
    """

    first: Plan
    second: Plan
    step: int
    chunk: int
    chunks: int | None


def chunk_bytes(block: FeedForward) -> int:
    """Return how many bytes of values between the layers there are to be at a time."""
    layers = block.first, block.second
    weights = sum(spec.depth * sum(o.lanes * (1 + (o.gate is not None)) for o in spec.outputs) for spec in layers)
    return max(CHUNK_BYTES, weights * tvm.DataType(block.first.dtype).bits // 8 // WEIGHTS_SHARE)


def cut(block: FeedForward, machine: Machine, most_bytes: int | None = None) -> Cut:
    """Choose the cut for a machine.

    Parameters
    ----------
    block : FeedForward
    machine : Machine
    most_bytes : int or None
        Of values between the layers that are there at a time, if that is not less than a tile's; None is
        :func:`chunk_bytes`.
    """
    first, second = plan(block.first, machine), plan(block.second, machine)
    step = math.lcm(first.height, second.height)
    row_bytes = block.hidden * tvm.DataType(block.second.sum_dtype).bits // 8
    most = max(1, (chunk_bytes(block) if most_bytes is None else most_bytes) // row_bytes // step) * step
    rows = rows_of(block.first)
    if rows is None:
        return Cut(first, second, step, most, None)
    chunks = max(1, -(-rows // most))
    if chunks == 1:
        return Cut(first, second, step, rows, 1)
    # Of nearly the same size.
    chunk = -(-math.ceil(rows / step) // chunks) * step
    first, second = (_of_chunk(spec, rows, chunk, machine) for spec in (block.first, block.second))
    return Cut(first, second, step, chunk, -(-rows // chunk))


def _of_chunk(spec: Spec, rows: int, chunk: int, machine: Machine) -> Plan:
    """Return the cut of a chunk, of which the last one may be lower."""
    found = plan(replace(spec, rows=(chunk,)), machine)
    heights = {n % found.height for n in (chunk, rows % chunk)} - {0}
    return replace(found, rests=tuple(sorted(heights, reverse=True)))


def _over_chunks(rows: int | Expr, cuts: Cut, emit: Callable[[int | Expr, int | Expr], None]) -> None:
    """Emit ``emit(first row, rows)`` for all chunks."""
    if cuts.chunks == 1:
        emit(0, rows)
        return
    chunk = cuts.chunk
    if isinstance(rows, int):
        with T.serial(-(-rows // chunk)) as at:
            base = T.bind(at * chunk)
            emit(base, T.bind(tirx.min(rows - base, chunk)) if rows % chunk else chunk)
        return
    # The bounds are loaded: of expressions that it sees through, TVM takes ten times as long to find out what is read.
    bounds = T.alloc_buffer((2,), "int64", scope="local", layout=None)
    tiles, pieces = (T.bind(tirx.floordiv(rows + (n - 1), n)) for n in (cuts.step, chunk))
    with T.serial(pieces) as at:
        for i in range(2):
            end = tirx.floordiv(tiles * (at + i), pieces) * cuts.step
            T.buffer_store(bounds, tirx.min(end, rows).astype("int64"), [i])
        base = T.bind(bounds[0])
        emit(base, T.bind(bounds[1] - base))


@lru_cache(maxsize=256)
def kernel(block: FeedForward, machine: Machine, most_bytes: int | None = None) -> tirx.PrimFunc:
    """Write the kernel; that of a model's equal blocks is written once.

    Parameters
    ----------
    block : FeedForward
    machine : Machine
    most_bytes : int or None
        As for :func:`cut`.

    Returns
    -------
    tvm.tirx.PrimFunc
        Takes and returns through its arguments; marked as scheduled, so that no rule touches it.
    """
    cuts, lanes, rows = cut(block, machine, most_bytes), machine.lanes(block.first.sum_dtype), count(block.first)
    with writing("fused_feed_forward") as builder:
        first = Frame(block.first, cuts.first, lanes, Operands(block.first, cuts.first, results=False))
        second = Frame(block.second, cuts.second, lanes, Operands(block.second, cuts.second, "_second", x=False))
        x = first.given.by_row()
        if isinstance(rows, int) and rows == 0:
            # TVM cannot lower loops of no turns with buffers in them.
            T.evaluate(tirx.const(0, "int32"))
        else:
            most = cuts.chunk if isinstance(rows, int) else tirx.min(rows, cuts.chunk)
            hidden = T.alloc_buffer((most, block.hidden), second.sums, layout=None)
            given, between = Rows(first, x, False, most), Rows(second, hidden, True, most)
            layers = Layer(first, given, Results(first, hidden)), Layer(second, between, Results(second))

            def chunk(base: int | Expr, here: int | Expr) -> None:
                first.base = second.base = base
                for source, layer in zip((given, between), layers):
                    source.prepare(here)
                    layer.write(here)

            _over_chunks(rows, cuts, chunk)
    return vectorizable_math(builder.get())
