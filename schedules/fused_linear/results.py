"""What a fused linear kernel does behind its sums: activation, gate, factor, norm of heads, rotation, residual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..activations import activate
from ..loops import along, unravel
from ..writing import cast
from .operands import Expr, Frame, index
from .rows import lanes_of_pair, normed, rotate
from .spec import Dim, Output

#: Stores a result at a lane.
Store = Callable[[Expr, Expr], None]


class Results:
    """Takes sums and stores results.

    Parameters
    ----------
    frame : Frame
    kept : Any
        A buffer of the kernel's own, ``(rows, lanes)``, for the only result there is, without heads, in which row 0
        is row 0 here; None where results are arguments.
    """

    def __init__(self, frame: Frame, kept: Any = None) -> None:
        self.frame, self.kept = frame, kept

    def choose(self, outputs: range, group: Expr, row: Expr, value: Callable[[Expr], Expr]) -> None:
        """Emit the steps of the output that a group belongs to; ``value`` is the sum of a column."""
        if len(outputs) == 1:
            self._finish(outputs[0], group, row, value)
            return
        with T.If(group < self.frame.cut.columns[outputs[1]].start):
            with T.Then():
                self._finish(outputs[0], group, row, value)
            with T.Else():
                self.choose(outputs[1:], group, row, value)

    def _finish(self, number: int, group: Expr, row: Expr, value: Callable[[Expr], Expr]) -> None:
        output, columns = self.frame.spec.outputs[number], self.frame.cut.columns[number]
        local = group - columns.start
        head = tirx.floordiv(local, columns.per_head)
        within = tirx.floormod(local, columns.per_head)
        at, store = self._places(number, unravel(head, output.heads), row)
        half, width = self.frame.cut.width // 2, self.frame.cut.width

        def result(value: Expr) -> Expr:
            return self._scaled(output, value)

        def pair(first: Expr, v: Expr) -> None:
            if output.gate is not None:
                store(result(activate(output.activation, value(v)) * value(v + half)), first + v)
                return
            assert output.rotary is not None
            values = [result(activate(output.activation, value(v + o))) for o in (0, half)]
            rotate(self.frame, output.rotary, self.frame.given.tables[number], values, first + v, at, store)

        def single(first: Expr, v: Expr) -> None:
            store(result(activate(output.activation, value(v))), first + v)

        turned = 0 if output.rotary is None else output.rotary.dim
        paired = output.lanes if output.gate is not None else turned // 2
        with_pairs, without = columns.pairs > 0, columns.per_head > columns.pairs
        if with_pairs and without:
            with T.If(within < columns.pairs):
                with T.Then():
                    _lanes(within * half, paired, half, pair)
                with T.Else():
                    first = (within - columns.pairs) * width
                    _lanes(first, output.lanes - turned, width, lambda f, v: single(f + turned, v))
        elif with_pairs:
            _lanes(within * half, paired, half, pair)
        else:
            _lanes(within * width, output.lanes, width, single)

    def head(
        self, number: int, head: Expr, row: Expr, height: Expr | int, sums: Callable[[Expr, Expr, Expr | int], Any]
    ) -> None:
        """Emit the steps of a whole head that is normed, its sums kept until the last group of them is there.

        Parameters
        ----------
        number, head, row, height
            Of the output, the head, a tile.
        sums : callable
            ``sums(group, row, height)`` returns a tile's.
        """
        frame, output, columns = self.frame, self.frame.spec.outputs[number], self.frame.cut.columns[number]
        norm, rotary, lanes, width = output.norm, output.rotary, output.lanes, frame.cut.width
        assert norm is not None
        whole = T.alloc_buffer((frame.cut.height, lanes), frame.sums, scope="local", layout=None)
        with T.serial(columns.per_head) as part:
            done = sums(columns.start + head * columns.per_head + part, row, height)
            with T.serial(height) as r:

                def keep(first: Expr, v: Expr) -> None:
                    kept = self._scaled(output, activate(output.activation, done[r, v]))
                    T.buffer_store(whole, kept, [r, first + v])

                _lanes(part * width, lanes, width, keep)
        with T.serial(height) as r:
            at, store = self._places(number, unravel(head, output.heads), row + r)
            value, _, _ = normed(frame, norm, frame.given.heads[number], lanes, lambda k: whole[r, k])
            turned = 0
            if rotary is not None:
                turned = rotary.dim

                def pair(first: Expr) -> None:
                    values = [value(lane) for lane in lanes_of_pair(rotary, first)]
                    rotate(frame, rotary, frame.given.tables[number], values, first, at, store)

                along(turned // 2, frame.lanes, pair)
            along(lanes - turned, frame.lanes, lambda k: store(value(k + turned), k + turned))

    def _scaled(self, output: Output, value: Expr) -> Expr:
        return value if output.scale == 1.0 else value * tirx.const(output.scale, self.frame.sums)

    def _places(
        self, number: int, heads: Sequence[Expr], row: Expr
    ) -> tuple[Callable[[Sequence[Dim], Expr], list[Expr]], Store]:
        """Return the indices of a lane of one head and row, and what stores a result there, the residual added."""
        frame, output = self.frame, self.frame.spec.outputs[number]
        rows = unravel(frame.row(row), frame.spec.rows)

        def at(dims: Sequence[Dim], lane: Expr) -> list[Expr]:
            return index(dims, rows, heads, lane)

        def store(result: Expr, lane: Expr) -> None:
            residual = frame.given.residuals[number]
            if residual is not None and output.residual is not None:
                result = result + frame.load(residual, *at(output.residual, lane))
            if self.kept is not None:
                T.buffer_store(self.kept, result, [row, lane])
                return
            T.buffer_store(frame.given.results[number], cast(result, frame.spec.dtype), at(output.dims, lane))

        return at, store


def _lanes(first: Expr, extent: int, width: int, emit: Callable[[Expr, Expr], None]) -> None:
    """Emit one group's lanes: a vector, or what is left of one where the group is not full."""
    if extent % width == 0:
        with T.vectorized(width) as v:
            emit(first, v)
        return
    if extent < width:
        with T.serial(extent) as v:
            emit(first, v)
        return
    with T.If(first + width <= extent):
        with T.Then(), T.vectorized(width) as v:
            emit(first, v)
        with T.Else(), T.serial(extent % width) as v:
            emit(first, v)
