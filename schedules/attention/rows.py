"""Attention of a few queries: registers hold elements of a head, keys and values are read once and as they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .lanes import summed
from .spec import Extent, Operand
from .writer import Expr, Part, Roles, Writer

#: Rows whose sums are in registers at once.
_TOGETHER = 3


class RowWriter(Writer):
    """Emits the kernel."""

    def write(self) -> None:
        """Emit everything."""
        spec, cut = self.spec, self.cut
        assert isinstance(self.rows, int)
        with self.units(1) as (unit, _):
            self.unit = unit
            self.queries = self.scratch(self.rows, spec.lanes)
            self.sum = self.scratch(self.rows, spec.value_lanes)
            self.scores = self.scratch(self.rows, cut.block)
            self.top, self.fade = self.scratch(self.rows), self.scratch(self.rows)
            self.total = self.scratch(self.rows, cut.lanes)
            self._start()
            for part in self.parts(spec.queries - 1):
                with T.serial(tirx.floordiv(part.limit + (cut.block - 1), cut.block)) as block:
                    begin = T.bind(block * cut.block)
                    self._block(part, begin, T.bind(tirx.min(part.limit - begin, cut.block)))
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
        return {**self.unit, **self.row(row)}

    def _start(self) -> None:
        spec, zero = self.spec, self.number(0.0)
        with T.serial(self.rows) as r:
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
        with T.serial(self.rows) as r:
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
        assert isinstance(self.rows, int)
        for first in range(0, self.rows, _TOGETHER):
            yield range(first, min(first + _TOGETHER, self.rows))

    def _block(self, part: Part, begin: Expr, count: Expr) -> None:
        spec, cut = self.spec, self.cut
        assert isinstance(self.rows, int)
        steps = T.bind(tirx.floordiv(count + (cut.lanes - 1), cut.lanes))
        with T.serial(steps) as step:
            for at in range(0, cut.lanes, cut.height):
                # Behind the last key it is taken again; what it gives is hidden afterwards.
                keys = [T.bind(tirx.min(step * cut.lanes + at + i, count - 1)) for i in range(cut.height)]
                for rows in self._together():
                    self._score(part, begin, keys, step * cut.lanes + at, rows)
        with T.serial(self.rows) as row:
            self._mask(row, part.start + begin, count)
            self._hide(part, begin, count, steps, row)
            self._weights(steps, row)
        for rows in self._together():
            whole, rest = divmod(spec.value_lanes, cut.depth)
            if whole:
                with T.serial(whole) as tile:
                    self._weigh(part, begin, count, tile * cut.depth, cut.depth, rows)
            if rest // cut.lanes:
                self._weigh(part, begin, count, whole * cut.depth, rest // cut.lanes * cut.lanes, rows)
            if rest % cut.lanes:
                at = spec.value_lanes - rest % cut.lanes
                with T.serial(rest % cut.lanes) as e:
                    self._weigh(part, begin, count, at + e, 1, rows)

    def _score(self, part: Part, begin: Expr, keys: Sequence[Expr], at: Expr, rows: range) -> None:
        """Sum the products of a few keys with a few rows; they stand from ``at`` on in the block."""
        spec, cut, lanes = self.spec, self.cut, self.cut.lanes
        operand, buffer = spec.k[part.index], self.k[part.index]
        vectors = spec.lanes // lanes if lanes > 1 and operand.runs_along("lane") else 0

        def element(key: Expr, e: Expr, many: int) -> Expr:
            return self.load(buffer, operand, {**self.unit, "key": begin + key, "lane": e}, many)

        if vectors:
            sums = self.scratch(len(rows) * cut.height, lanes)
            for i in range(len(rows) * cut.height):
                with T.vectorized(lanes) as v:
                    T.buffer_store(sums, self.number(0.0), [i, v])
            with T.serial(vectors) as chunk:
                for i, key in enumerate(keys):
                    loaded = T.bind(element(key, chunk * lanes, lanes))
                    for j, row in enumerate(rows):
                        place = [j * cut.height + i, tirx.Ramp(0, 1, lanes)]
                        query = self.queries[row, tirx.Ramp(chunk * lanes, 1, lanes)]
                        T.buffer_store(sums, sums[tuple(place)] + loaded * query, place)
            across = tirx.Ramp(at, 1, cut.height) if cut.height > 1 else at
            for j, row in enumerate(rows):
                of_row = [sums[j * cut.height + i, tirx.Ramp(0, 1, lanes)] for i in range(cut.height)]
                T.buffer_store(self.scores, summed(of_row, lanes), [row, across])
        else:
            for row in rows:
                for i in range(cut.height):
                    T.buffer_store(self.scores, self.number(0.0), [row, at + i])
        if spec.lanes - vectors * lanes:
            with T.serial(spec.lanes - vectors * lanes) as rest:
                e = vectors * lanes + rest
                for i, key in enumerate(keys):
                    loaded = T.bind(element(key, e, 1))
                    for row in rows:
                        value = self.scores[row, at + i] + loaded * self.queries[row, e]
                        T.buffer_store(self.scores, value, [row, at + i])

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
        lanes, end = self.cut.lanes, count
        if self.spec.causal is not None:
            seen = self._roles(row)["query"] + self.spec.causal + 1 - part.start - begin
            end = T.bind(tirx.max(tirx.min(count, seen), 0))
        with T.serial(tirx.floordiv(end, lanes), steps) as step, T.vectorized(lanes) as v:
            key = step * lanes + v
            hidden = tirx.Select(key < end, self.scores[row, key], self.number(float("-inf")))
            T.buffer_store(self.scores, hidden, [row, key])

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

    def _weigh(self, part: Part, begin: Expr, count: Expr, at: Expr | int, depth: int, rows: range) -> None:
        """Add the weighed values of a block, ``depth`` elements of them, to a few rows."""
        operand, buffer = self.spec.v[part.index], self.v[part.index]
        lanes = self.cut.lanes if depth > 1 else 1
        vectors = depth // lanes
        # One sum alone would wait for itself.
        apart = 2 if len(rows) * vectors <= 4 else 1
        sums = self.scratch(apart * len(rows), depth)

        def along(first: Expr | int) -> Expr | int:
            return tirx.Ramp(first, 1, lanes) if lanes > 1 else first

        def alike(value: Expr) -> Expr:
            return tirx.Broadcast(value, lanes) if lanes > 1 else value

        for j, row in enumerate(rows):
            for n in range(vectors):
                old = self.sum[row, along(at + n * lanes)] * alike(self.fade[row])
                T.buffer_store(sums, old, [j * apart, along(n * lanes)])
                for other in range(1, apart):
                    T.buffer_store(sums, alike(self.number(0.0)), [j * apart + other, along(n * lanes)])

        def add(key: Expr, which: int) -> None:
            weights = [T.bind(alike(self.scores[row, key])) for row in rows]
            for n in range(vectors):
                roles: Roles = {**self.unit, "key": begin + key, "lane": at + n * lanes}
                loaded = T.bind(self._values(buffer, operand, roles, lanes))
                for j, weight in enumerate(weights):
                    spot = [j * apart + which, along(n * lanes)]
                    T.buffer_store(sums, sums[tuple(spot)] + loaded * weight, spot)

        with T.serial(tirx.floordiv(count, apart)) as pair:
            for which in range(apart):
                add(pair * apart + which, which)
        if apart > 1:
            with T.If(tirx.floormod(count, apart) != 0), T.Then():
                add(count - 1, 0)
        for j, row in enumerate(rows):
            for n in range(vectors):
                total = sums[j * apart, along(n * lanes)]
                for other in range(1, apart):
                    total = total + sums[j * apart + other, along(n * lanes)]
                T.buffer_store(self.sum, total, [row, along(at + n * lanes)])

    def _values(self, buffer: Any, operand: Operand, roles: Roles, lanes: int) -> Expr:
        """Return neighbouring elements of a value, from wherever they lie."""
        if lanes == 1 or operand.runs_along("lane"):
            return self.load(buffer, operand, roles, lanes)
        single = [self.load(buffer, operand, {**roles, "lane": roles["lane"] + i}) for i in range(lanes)]
        return tirx.Shuffle(single, [tirx.const(i, "int32") for i in range(lanes)])
