"""Write a fused linear kernel as TIR.

Rows are normed, turned and widened once, into a buffer of their own (an RMS norm without weight alone becomes a
factor of the sums).  Then every group of columns goes over the rows in tiles: sums of products in registers, and on
each tile, still in the first-level cache, the steps behind the sum.  Where heads are normed, the tile's sums of a whole
head are kept until the last of its groups is there.  Nothing between x and the results is written to memory otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..elementary import vectorizable_math
from ..machine import Machine
from ..writing import writing
from .operands import Expr, Frame, Operands, count
from .plan import plan
from .results import Results
from .rows import Rows
from .spec import Spec
from .sums import Sums


class Layer:
    """Goes over units of columns, and under each over rows.

    Parameters
    ----------
    frame : Frame
    rows : Rows
        What is summed over.
    results : Results
        What takes the sums.
    """

    def __init__(self, frame: Frame, rows: Rows, results: Results) -> None:
        self.frame, self.sums, self.results = frame, Sums(frame, rows), results

    def write(self, rows: Expr | int) -> None:
        """Emit the products of so many rows, of a chunk of which each unit of columns is worked through at once."""
        cut = self.frame.cut
        chunk, chunks = self._chunks(rows)
        one = isinstance(chunks, int) and chunks == 1
        extent = chunks * cut.units
        with T.parallel(extent) if cut.parallel else T.serial(extent) as at:
            unit = at if one else T.bind(tirx.floormod(at, cut.units))
            start = 0 if one else T.bind(tirx.floordiv(at, cut.units) * chunk)
            here = rows if one else T.bind(tirx.min(rows - start, chunk))
            self._unit(0, unit, start, here)

    def _chunks(self, rows: Expr | int) -> tuple[int | Expr, int | Expr]:
        """Return the rows of a chunk and the number of chunks, all of nearly the same size."""
        cut = self.frame.cut
        if isinstance(rows, int):
            return cut.chunk, -(-rows // cut.chunk)
        pieces = T.bind(tirx.max(ceildiv(rows, cut.chunk), cut.pieces))
        tiles = T.bind(tirx.max(ceildiv(ceildiv(rows, pieces), cut.height), 1))
        return tiles * cut.height, ceildiv(rows, tiles * cut.height)

    def _unit(self, number: int, unit: Expr, start: Expr | int, rows: Expr | int) -> None:
        """Emit the work of the unit, which is of output ``number`` or of one behind it."""
        outputs, cut = self.frame.spec.outputs, self.frame.cut
        columns = cut.columns
        until = number + 1
        if outputs[number].norm is None:
            # Units of outputs side by side are groups: one loop for all of them.
            while until < len(outputs) and outputs[until].norm is None:
                until += 1
        side_by_side = range(number, until)

        def work() -> None:
            if outputs[number].norm is not None:
                head = unit - columns[number].unit
                self._tiles(start, rows, lambda row, high: self.results.head(number, head, row, high, self.sums.tile))
                return
            if cut.abreast > 1:
                zero = tirx.const(0, "int32")
                self.sums.abreast(
                    unit * cut.abreast, lambda group, value: self.results.choose(side_by_side, group, zero, value)
                )
                return
            shift = columns[number].start - columns[number].unit
            group = unit + shift if shift else unit
            self._tiles(start, rows, lambda *tile: self._tile(side_by_side, group, *tile))

        if until == len(outputs):
            work()
            return
        with T.If(unit < columns[until].unit):
            with T.Then():
                work()
            with T.Else():
                self._unit(until, unit, start, rows)

    def _tiles(self, start: Expr | int, rows: Expr | int, emit: Callable[[Expr, Expr | int], None]) -> None:
        """Emit ``emit(row, height)`` for the tiles of a chunk; the last one may be lower than the others."""
        height = self.frame.cut.height
        tiles = -(-rows // height) if isinstance(rows, int) else tirx.floordiv(rows + (height - 1), height)
        with T.serial(tiles) as tile:
            here = T.bind(tirx.min(rows - tile * height, height)) if self.frame.cut.rests else height
            emit(start + tile * height, here)

    def _tile(self, outputs: range, group: Expr, row: Expr, height: Expr | int) -> None:
        """Sum rows of one group, which belongs to one of ``outputs``, and apply the steps behind."""
        done = self.sums.tile(group, row, height)
        # A loop, not copies: an index that is not a number would keep the sums out of registers, `done` may wait.
        with T.serial(height) as r:
            self.results.choose(outputs, group, row + r, lambda v: done[r, v])


def ceildiv(a: Expr, b: Expr | int) -> Expr:
    """Return how many times b a is, rounded up."""
    return tirx.floordiv(a + (b - 1), b)


@lru_cache(maxsize=256)
def kernel(spec: Spec, machine: Machine) -> tirx.PrimFunc:
    """Write the kernel; that of a model's equal layers is written once.

    Parameters
    ----------
    spec : Spec
    machine : Machine

    Returns
    -------
    tvm.tirx.PrimFunc
        Takes and returns through its arguments, see :class:`Spec`; marked as scheduled, so that no rule touches it.
    """
    return own_kernel(spec, machine)


def own_kernel(spec: Spec, machine: Machine) -> tirx.PrimFunc:
    """Write the kernel anew, as :func:`kernel` does: one that becomes part of another shares no buffer with any."""
    cut, rows = plan(spec, machine), count(spec)
    with writing("fused_linear") as builder:
        given = Operands(spec, cut)
        frame = Frame(spec, cut, machine.lanes(spec.sum_dtype), given)
        x = given.by_row()
        if isinstance(rows, int) and rows == 0:
            # TVM cannot lower loops of no turns with buffers in them.
            T.evaluate(tirx.const(0, "int32"))
        else:
            source = Rows(frame, x, False, rows)
            source.prepare(rows)
            Layer(frame, source, Results(frame)).write(rows)
    return vectorizable_math(builder.get())
