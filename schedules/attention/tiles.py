"""Attention of many queries: registers hold rows (queries, times the heads that share keys), side by side.

A tile of queries is turned once, so that elements of a head follow one another and rows fill the lanes.  Then scores
are ``s[key, rows] += k[key, e] * q[e, rows]``, weights are taken of whole registers, each row's maximum and sum in a
lane of its own, and values are ``o[e, rows] += v[key, e] * w[key, rows]``: single elements of k and v as they lie in
memory, times registers; nothing is summed across lanes, nothing but q and the result is turned.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .lanes import turned
from .spec import Extent, Operand
from .writer import Expr, Part, Roles, Writer


class TileWriter(Writer):
    """Emits the kernel."""

    def write(self) -> None:
        """Emit everything."""
        spec, cut, rows = self.spec, self.cut, self.rows
        if isinstance(rows, int):
            tiles: Extent = -(-rows // cut.width)
        else:
            tiles = tirx.floordiv(rows + (cut.width - 1), cut.width)
        with self.units(tiles) as (unit, tile):
            first = T.bind(tile * cut.width)
            self.unit, self.first = unit, first
            self.queries = self.scratch(spec.lanes, cut.width)
            self.sum = self.scratch(spec.value_lanes, cut.width)
            self.scores = self.scratch(cut.block, cut.width)
            self.top, self.peak = self.scratch(cut.width), self.scratch(cut.width)
            self.total, self.fade = self.scratch(cut.width), self.scratch(cut.width)
            self.staged = [self.scratch(cut.block, cut.width) if self._by_row(o) else None for _, o in self.added()]
            self.copies = [
                self.scratch(cut.block, extent) if self._is_copied(operands) else None
                for operands, extent in ((spec.k, spec.lanes), (spec.v, spec.value_lanes))
            ]
            self._start()
            last = tirx.min(first + cut.width, rows) - 1
            for part in self.parts(self.row(last)["query"]):
                blocks = tirx.floordiv(part.limit + (cut.block - 1), cut.block)
                with T.serial(blocks) as block:
                    begin = T.bind(block * cut.block)
                    self._block(part, begin, T.bind(tirx.min(part.limit - begin, cut.block)))
            self._finish()

    # Rows --------------------------------------------------------------------------------------------------------

    def _across(self) -> AbstractContextManager[Expr]:
        """Return the loop over a tile's rows."""
        return T.vectorized(self.cut.width)

    def _row(self, lane: Extent) -> Roles:
        """Return the roles of a lane's row; lanes behind the last row repeat it."""
        return {**self.unit, **self.row(tirx.min(self.first + lane, self.rows - 1))}

    def _start(self) -> None:
        spec, cut = self.spec, self.cut
        scale = self.number(spec.scale)

        def one(r: Expr, e: Expr) -> None:
            value = self.load(self.q, spec.q, {**self._row(r), "lane": e})
            T.buffer_store(self.queries, value * scale, [e, r])

        def many(r: Expr, e: Expr) -> Expr:
            value = self.load(self.q, spec.q, {**self._row(r), "lane": e}, cut.lanes)
            return value * tirx.Broadcast(scale, cut.lanes)

        self._turn(spec.lanes, many if spec.q.runs_along("lane") else None, one, self.queries)
        with self._across() as v:
            T.buffer_store(self.top, self.lowest, [v])
        with self._across() as v:
            T.buffer_store(self.total, self.number(0.0), [v])
        with T.serial(spec.value_lanes) as e:
            with self._across() as v:
                T.buffer_store(self.sum, self.number(0.0), [e, v])

    def _turn(
        self,
        extent: Extent,
        many: Callable[[Expr, Expr], Expr] | None,
        one: Callable[[Expr, Expr], None],
        into: Any,
    ) -> None:
        """Fill ``into[e, row]``: squares of ``many(row, e)`` in registers, what is left over by ``one(row, e)``."""
        lanes, width = self.cut.lanes, self.cut.width
        squares: Extent = 0
        if many is not None and lanes > 1:
            squares = extent // lanes if isinstance(extent, int) else tirx.floordiv(extent, lanes)
            with T.serial(width // lanes) as group, T.serial(squares) as square:
                loaded = [T.bind(many(group * lanes + i, square * lanes)) for i in range(lanes)]
                for i, column in enumerate(turned(loaded, lanes)):
                    T.buffer_store(into, column, [square * lanes + i, tirx.Ramp(group * lanes, 1, lanes)])
        with T.serial(extent - squares * lanes) as rest, T.serial(width) as r:
            one(r, squares * lanes + rest)

    def _finish(self) -> None:
        """Divide by the sum of the weights, and turn the result back."""
        spec, cut, lanes = self.spec, self.cut, self.cut.lanes
        with self._across() as v:
            T.buffer_store(self.total, self.inverse(self.total[v]), [v])
        squares = spec.value_lanes // lanes if lanes > 1 and spec.out.runs_along("lane") else 0

        def store(r: Expr, e: Expr, value: Expr, count: int = 1) -> None:
            with T.If(self.first + r < self.rows), T.Then():
                roles: Roles = {**self.unit, **self.row(self.first + r), "lane": e}
                indices = [axis.at(roles) for axis in spec.out.axes]
                if count > 1:
                    indices[-1] = tirx.Ramp(indices[-1], 1, count)
                dtype = spec.out.dtype if count == 1 else f"{spec.out.dtype}x{count}"
                T.buffer_store(self.out, value if str(value.ty.dtype) == dtype else value.astype(dtype), indices)

        with T.serial(cut.width // lanes) as group:
            across = tirx.Ramp(group * lanes, 1, lanes) if lanes > 1 else group
            with T.serial(squares) as square:
                factor = T.bind(self.total[across])
                loaded = [T.bind(self.sum[square * lanes + i, across] * factor) for i in range(lanes)]
                for i, value in enumerate(turned(loaded, lanes)):
                    store(group * lanes + i, square * lanes, value, lanes)
        with T.serial(cut.width) as r, T.serial(spec.value_lanes - squares * lanes) as rest:
            e = squares * lanes + rest
            store(r, e, self.sum[e, r] * self.total[r])

    # Keys --------------------------------------------------------------------------------------------------------

    def _is_copied(self, operands: tuple[Operand, ...]) -> bool:
        """Return whether single elements are better read from a copy: of the sums' type, lanes side by side."""
        return any(o.dtype != self.sums or not o.runs_along("lane") for o in operands)

    def _block(self, part: Part, begin: Expr, count: Expr) -> None:
        spec, cut = self.spec, self.cut
        sources = ((self.k, spec.k, spec.lanes), (self.v, spec.v, spec.value_lanes))
        for copy, (buffers, operands, extent) in zip(self.copies, sources):
            if copy is not None:
                self._copy(copy, buffers[part.index], operands[part.index], extent, begin, count)
        for (buffer, operand), staged in zip(self.added(), self.staged):
            if staged is not None:
                self._stage(buffer, operand, staged, part.start + begin, count)
        with self._across() as v:
            T.buffer_store(self.peak, self.top[v], [v])
        with T.serial(tirx.floordiv(count + (cut.height - 1), cut.height)) as tile:
            self._score(part, begin, count, tile)
        with self._across() as v:
            T.buffer_store(self.fade, tirx.exp(self.top[v] - self.peak[v]), [v])
        with self._across() as v:
            T.buffer_store(self.top, self.peak[v], [v])
        with self._across() as v:
            T.buffer_store(self.total, self.total[v] * self.fade[v], [v])
        with T.serial(count) as key:
            with self._across() as v:
                T.buffer_store(self.scores, tirx.exp(self.scores[key, v] - self.peak[v]), [key, v])
            with self._across() as v:
                T.buffer_store(self.total, self.total[v] + self.scores[key, v], [v])
        whole, rest = divmod(spec.value_lanes, cut.depth)
        if whole:
            with T.serial(whole) as tile:
                self._weigh(part, begin, count, tile * cut.depth, cut.depth)
        if rest:
            self._weigh(part, begin, count, whole * cut.depth, rest)

    def _copy(self, copy: Any, buffer: Any, operand: Operand, extent: int, begin: Expr, count: Expr) -> None:
        """Copy a block of keys or values."""

        def value(key: Expr, e: Expr) -> Expr:
            return self.load(buffer, operand, {**self.unit, "key": begin + key, "lane": e})

        if operand.runs_along("lane"):
            lanes = self.cut.lanes
            with T.serial(count) as key:
                if extent // lanes:
                    with T.serial(extent // lanes) as chunk, T.vectorized(lanes) as v:
                        T.buffer_store(copy, value(key, chunk * lanes + v), [key, chunk * lanes + v])
                if extent % lanes:
                    with T.serial(extent % lanes) as rest:
                        e = extent // lanes * lanes + rest
                        T.buffer_store(copy, value(key, e), [key, e])
            return
        with T.serial(extent) as e, T.serial(count) as key:
            T.buffer_store(copy, value(key, e), [key, e])

    def _element(self, which: int, part: Part, begin: Expr, key: Expr, e: Expr) -> Expr:
        """Return an element of the keys (0) or values (1) of a block."""
        copy = self.copies[which]
        if copy is not None:
            return copy[key, e]
        buffer, operand = ((self.k, self.spec.k), (self.v, self.spec.v))[which]
        return self.load(buffer[part.index], operand[part.index], {**self.unit, "key": begin + key, "lane": e})

    def _score(self, part: Part, begin: Expr, count: Expr, tile: Expr) -> None:
        """Sum the products of a few keys with a tile of queries."""
        cut, zero = self.cut, self.number(0.0)
        # Behind the last key it is taken again: its scores change no maximum, and its weights are never read.
        keys = [T.bind(tirx.min(tile * cut.height + i, count - 1)) for i in range(cut.height)]
        sums = self.scratch(cut.height, cut.width)
        for i in range(cut.height):
            with self._across() as v:
                T.buffer_store(sums, zero, [i, v])
        with T.serial(self.spec.lanes) as e:
            for i, key in enumerate(keys):
                with self._across() as v:
                    T.buffer_store(
                        sums, sums[i, v] + self._element(0, part, begin, key, e) * self.queries[e, v], [i, v]
                    )
        for i, key in enumerate(keys):
            with self._across() as v:
                T.buffer_store(
                    self.scores, self._seen(part.start + begin, key, v, sums[i, v]), [tile * cut.height + i, v]
                )
            with self._across() as v:
                T.buffer_store(self.peak, tirx.max(self.peak[v], self.scores[tile * cut.height + i, v]), [v])

    def _weigh(self, part: Part, begin: Expr, count: Expr, at: Expr | int, depth: int) -> None:
        """Add the weighed values of a block, a few elements of them."""
        sums = self.scratch(depth, self.cut.width)
        for i in range(depth):
            with self._across() as v:
                T.buffer_store(sums, self.sum[at + i, v] * self.fade[v], [i, v])
        with T.serial(count) as key:
            for i in range(depth):
                with self._across() as v:
                    T.buffer_store(
                        sums, sums[i, v] + self._element(1, part, begin, key, at + i) * self.scores[key, v], [i, v]
                    )
        for i in range(depth):
            with self._across() as v:
                T.buffer_store(self.sum, sums[i, v], [at + i, v])

    # Masks -------------------------------------------------------------------------------------------------------

    def _by_row(self, operand: Operand) -> bool:
        """Return whether an operand's values differ between the rows of a tile."""
        return operand.has("query") or (operand.has("group") and self.spec.groups > 1)

    def _stage(self, buffer: Any, operand: Operand, staged: Any, start: Expr, count: Expr) -> None:
        """Turn a block of a mask, so that its rows fill the lanes."""

        def one(r: Expr, key: Expr) -> None:
            T.buffer_store(staged, self.load(buffer, operand, {**self._row(r), "key": start + key}), [key, r])

        def many(r: Expr, key: Expr) -> Expr:
            return self.load(buffer, operand, {**self._row(r), "key": start + key}, self.cut.lanes)

        self._turn(count, many if operand.runs_along("key") else None, one, staged)

    def _seen(self, start: Expr, key: Expr, v: Expr, score: Expr) -> Expr:
        """Return a score under the masks."""
        values: dict[int, Expr] = {}
        for (buffer, operand), staged in zip(self.added(), self.staged):
            roles: Roles = {**self.unit, "query": 0, "group": 0, "key": start + key}
            values[id(buffer)] = staged[key, v] if staged is not None else self.load(buffer, operand, roles)
        score = self.masked(score, values.get(id(self.mask)), values.get(id(self.bias)))
        if self.spec.causal is None:
            return score
        query = tirx.floordiv(self.first + v, self.spec.groups) if self.spec.groups > 1 else self.first + v
        return tirx.Select(start + key <= query + self.spec.causal, score, self.number(float("-inf")))
