"""Attention of a few queries: registers hold elements of a head, or keys, whichever are neighbours in memory.

Keys and values are read once for the rows that share them, and as they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .row_products import RowProducts
from .spec import Extent
from .writer import Expr, Part, Roles

#: Rows whose sums are in registers at once.
_TOGETHER = 3


class RowWriter(RowProducts):
    """Emits the kernel."""

    def write(self) -> None:
        """Emit everything."""
        spec, cut, rows = self.spec, self.cut, self.cut.width
        at_once = rows // spec.groups
        units = spec.queries // at_once if isinstance(spec.queries, int) else tirx.floordiv(spec.queries, at_once)
        with self.units(units) as (unit, tile):
            self.unit, self.first = unit, T.bind(tile * at_once)
            self.queries = self.scratch(rows, spec.lanes)
            self.sum = self.scratch(rows, spec.value_lanes)
            self.scores = self.scratch(rows, cut.block)
            self.top, self.fade = self.scratch(rows), self.scratch(rows)
            self.total = self.scratch(rows, cut.lanes)
            self._start()
            for part in self.parts(self.first, self.first + (at_once - 1)):
                with self.blocks(part) as (begin, count):
                    self._block(part, begin, count)
            self._finish()

    # Rows --------------------------------------------------------------------------------------------------------

    def _along(self, extent: Extent, emit: Callable[[Expr], None]) -> None:
        """Emit ``emit(i)`` for all i, in vectors and a remainder."""
        lanes = self.cut.lanes
        whole = extent // lanes if isinstance(extent, int) else tirx.floordiv(extent, lanes)
        if lanes > 1 and not (isinstance(whole, int) and whole == 0):
            with T.serial(whole) as chunk, T.vectorized(lanes) as v:
                emit(chunk * lanes + v)
        else:
            whole = 0
        with T.serial(extent - whole * lanes) as rest:
            emit(whole * lanes + rest)

    def _roles(self, row: Extent) -> Roles:
        of_row = self.row(row)
        return {**self.unit, **of_row, "query": self.first + of_row["query"]}

    def _start(self) -> None:
        spec, zero = self.spec, self.number(0.0)
        with T.serial(self.cut.width) as r:
            roles = self._roles(r)
            scale = self.number(spec.scale)
            self._along(
                spec.lanes,
                lambda e: T.buffer_store(self.queries, self.load(self.q, spec.q, {**roles, "lane": e}) * scale, [r, e]),
            )
            self._along(spec.value_lanes, lambda e: T.buffer_store(self.sum, zero, [r, e]))
            T.buffer_store(self.top, self.lowest, [r])
            with T.vectorized(self.cut.lanes) as v:
                T.buffer_store(self.total, zero, [r, v])

    def _finish(self) -> None:
        spec = self.spec
        with T.serial(self.cut.width) as r:
            factor = T.bind(self.inverse(self._folded(self.total, r, self.cut.lanes, lambda a, b: a + b)))
            roles = self._roles(r)

            def store(e: Expr) -> None:
                value = self.sum[r, e] * factor
                value = value if self.sums == spec.out.dtype else value.astype(spec.out.dtype)
                T.buffer_store(self.out, value, [axis.at({**roles, "lane": e}) for axis in spec.out.axes])

            self._along(spec.value_lanes, store)

    def _folded(self, buffer: Any, row: Extent, width: int, join: Callable[[Expr, Expr], Expr]) -> Expr:
        """Join the first ``width`` elements of a row into its first, and return that."""
        while width > 1:
            width //= 2
            with T.vectorized(width) if width > 1 else T.serial(1) as v:
                T.buffer_store(buffer, join(buffer[row, v], buffer[row, v + width]), [row, v])
        return buffer[row, 0]

    # Keys --------------------------------------------------------------------------------------------------------

    def _together(self) -> Iterator[range]:
        """Yield the rows in stretches whose sums are in registers at once."""
        for first in range(0, self.cut.width, _TOGETHER):
            yield range(first, min(first + _TOGETHER, self.cut.width))

    def _block(self, part: Part, begin: Expr, count: Expr) -> None:
        for rows in self._together():
            self.score(part, begin, count, rows)
        steps = T.bind(tirx.floordiv(count + (self.cut.lanes - 1), self.cut.lanes))
        with T.serial(self.cut.width) as row:
            self._mask(row, part.start + begin, count)
            self._hide(part, begin, count, steps, row)
            self._weights(steps, row)
        for rows in self._together():
            self.weigh(part, begin, count, rows)

    def _mask(self, row: Expr, start: Expr, count: Expr) -> None:
        if not self.added():
            return
        roles = self._roles(row)

        def apply(key: Expr) -> None:
            values = {
                id(buffer): self.load(buffer, operand, {**roles, "key": start + key})
                for buffer, operand in self.added()
            }
            score = self.masked(self.scores[row, key], values.get(id(self.mask)), values.get(id(self.bias)))
            T.buffer_store(self.scores, score, [row, key])

        self._along(count, apply)

    def _hide(self, part: Part, begin: Expr, count: Expr, steps: Expr, row: Expr) -> None:
        """Give keys that are not there, or not seen by a row, no weight."""
        lanes, end, causal, window = self.cut.lanes, count, self.spec.causal, self.spec.window

        def hide(step: Expr, hidden: Callable[[Expr], Expr]) -> None:
            with T.vectorized(lanes) as v:
                key = step * lanes + v
                score = tirx.Select(hidden(key), self.number(float("-inf")), self.scores[row, key])
                T.buffer_store(self.scores, score, [row, key])

        # The rows of one query see what is read at all.
        if causal is not None and self.cut.width > self.spec.groups:
            seen = self._roles(row)["query"] + causal + 1 - part.start - begin
            end = T.bind(tirx.max(tirx.min(count, seen), 0))
            if window is not None:
                first = T.bind(tirx.max(tirx.min(count, seen - window), 0))
                with T.serial(tirx.floordiv(first + (lanes - 1), lanes)) as step:
                    hide(step, lambda key: key < first)
        with T.serial(tirx.floordiv(end, lanes), steps) as step:
            hide(step, lambda key: key >= end)

    def _weights(self, steps: Expr, row: Expr) -> None:
        """Turn a row's scores into weights, and add these up."""
        lanes = self.cut.lanes
        peak = self.scratch(1, lanes)
        with T.vectorized(lanes) as v:
            T.buffer_store(peak, self.top[row], [0, v])
        with T.serial(steps) as step, T.vectorized(lanes) as v:
            T.buffer_store(peak, tirx.max(peak[0, v], self.scores[row, step * lanes + v]), [0, v])
        top = T.bind(self._folded(peak, 0, lanes, tirx.max))
        fade = T.bind(tirx.exp(self.top[row] - top))
        T.buffer_store(self.fade, fade, [row])
        T.buffer_store(self.top, top, [row])
        with T.vectorized(lanes) as v:
            T.buffer_store(self.total, self.total[row, v] * fade, [row, v])
        with T.serial(steps) as step:
            with T.vectorized(lanes) as v:
                key = step * lanes + v
                T.buffer_store(self.scores, tirx.exp(self.scores[row, key] - top), [row, key])
            with T.vectorized(lanes) as v:
                T.buffer_store(self.total, self.total[row, v] + self.scores[row, step * lanes + v], [row, v])
