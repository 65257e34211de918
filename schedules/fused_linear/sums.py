"""The sums of products of a fused linear kernel, in registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .operands import Expr, Frame
from .rows import Rows


class Sums:
    """Sums tiles of rows of one group of columns, or one row of neighbouring groups."""

    def __init__(self, frame: Frame, rows: Rows) -> None:
        self.frame, self.rows = frame, rows

    def tile(self, group: Expr, row: Expr, height: Expr | int) -> Any:
        """Return the sums of a tile's rows of one group."""
        cut = self.frame.cut
        done = T.alloc_buffer((cut.height, cut.width), self.frame.sums, scope="local", layout=None)

        def choose(heights: Sequence[int]) -> None:
            if len(heights) == 1:
                self._rows(done, group, row, heights[0])
                return
            with T.If(height == heights[0]):
                with T.Then():
                    self._rows(done, group, row, heights[0])
                with T.Else():
                    choose(heights[1:])

        choose([cut.height, *cut.rests])
        if self.rows.far is not None:
            with T.serial(height) as r:
                self._anew(done, r, group, row + r)
        return done

    def _rows(self, done: Any, group: Expr, row: Expr, height: int) -> None:
        """Sum ``height`` rows, each in as many sums as keep the adders busy."""
        frame, weight = self.frame, self.frame.given.weight
        depth, width, zero = frame.spec.depth, frame.cut.width, tirx.const(0.0, frame.sums)
        partial = frame.cut.partial(height)
        sums = T.alloc_buffer((height * partial, width), frame.sums, scope="local", layout=None)
        for i in range(height * partial):
            with T.vectorized(width) as v:
                T.buffer_store(sums, zero, [i, v])

        def step(k: Expr | int, part: int) -> None:
            for r in range(height):
                at = r * partial + part
                with T.vectorized(width) as v:
                    term = self.rows.load(row + r, k) * frame.load(weight, group, k, v)
                    T.buffer_store(sums, sums[at, v] + term, [at, v])

        if depth // partial:
            with T.serial(depth // partial) as chunk:
                for part in range(partial):
                    step(chunk * partial + part, part)
        for part in range(depth % partial):
            step(depth // partial * partial + part, part)
        for r in range(height):
            with T.vectorized(width) as v:
                total = sums[r * partial, v]
                for part in range(1, partial):
                    total = total + sums[r * partial + part, v]
                T.buffer_store(done, self._whole(total, group, row + r, v), [r, v])

    def _anew(self, done: Any, at: Expr, group: Expr, row: Expr | int) -> None:
        """Sum a row that lies far from 0 once more, its mean taken off each value first."""
        far, frame = self.rows.far, self.frame
        with T.If(far[row] != tirx.const(0.0, frame.sums)), T.Then():
            with T.vectorized(frame.cut.width) as v:
                T.buffer_store(done, tirx.const(0.0, frame.sums), [at, v])
            with T.serial(frame.spec.depth) as k, T.vectorized(frame.cut.width) as v:
                term = (self.rows.load(row, k) - far[row]) * frame.load(frame.given.weight, group, k, v)
                T.buffer_store(done, done[at, v] + term, [at, v])
            with T.vectorized(frame.cut.width) as v:
                T.buffer_store(done, self._whole(done[at, v], group, row, v), [at, v])

    def abreast(self, first: Expr, emit: Callable[[Expr, Callable[[Expr], Expr]], None]) -> None:
        """Sum the only row there is of neighbouring groups, and emit ``emit(group, sum of a column)`` for each."""
        frame, cut, weight = self.frame, self.frame.cut, self.frame.given.weight
        zero = tirx.const(0.0, frame.sums)
        full = cut.groups % cut.abreast == 0
        # In the place of a group that there is not, the last one is summed once more.
        groups = [first + i if full else T.bind(tirx.min(first + i, cut.groups - 1)) for i in range(cut.abreast)]
        sums = T.alloc_buffer((cut.abreast, cut.width), frame.sums, scope="local", layout=None)
        done = T.alloc_buffer((cut.abreast, cut.width), frame.sums, scope="local", layout=None)
        for i in range(cut.abreast):
            with T.vectorized(cut.width) as v:
                T.buffer_store(sums, zero, [i, v])
        with T.serial(frame.spec.depth) as k:
            for i, group in enumerate(groups):
                with T.vectorized(cut.width) as v:
                    term = self.rows.load(0, k) * frame.load(weight, group, k, v)
                    T.buffer_store(sums, sums[i, v] + term, [i, v])
        for i, group in enumerate(groups):
            with T.vectorized(cut.width) as v:
                T.buffer_store(done, self._whole(sums[i, v], group, 0, v), [i, v])
        if self.rows.far is not None:
            with T.serial(cut.abreast) as i:
                self._anew(done, i, tirx.min(first + i, cut.groups - 1), 0)
        with T.serial(cut.abreast if full else tirx.min(cut.groups - first, cut.abreast)) as i:
            emit(first + i, lambda v: done[i, v])

    def _whole(self, total: Expr, group: Expr, row: Expr | int, v: Expr) -> Expr:
        """Return a sum with the row's factor and the column's bias."""
        factor, bias = self.rows.factor, self.frame.given.bias
        total = total if factor is None else total * factor[row]
        return total if bias is None else total + self.frame.load(bias, group, v)
