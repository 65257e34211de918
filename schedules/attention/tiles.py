"""Attention of many queries: registers hold rows (queries, times the heads that share keys), side by side.

A tile of queries is turned once, so that elements of a head follow one another and rows fill the lanes.  Then scores
are ``s[key, rows] += k[key, e] * q[e, rows]``, weights are taken of whole registers, each row's maximum and sum in a
lane of its own, and values are ``o[e, rows] += v[key, e] * w[key, rows]``: single elements of k and v as they lie in
memory, times registers; nothing is summed across lanes, nothing but q and the result is turned.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .spec import Extent, Operand
from .tile_rows import TileRows
from .writer import Expr, Part, Roles


class TileWriter(TileRows):
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
            self.start()
            last = tirx.min(first + cut.width, rows) - 1
            for part in self.parts(self.row(first)["query"], self.row(last)["query"]):
                with self.blocks(part) as (begin, count):
                    self._block(part, begin, count)
            self.finish()

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
        with self.across() as v:
            T.buffer_store(self.peak, self.top[v], [v])
        with T.serial(tirx.floordiv(count + (cut.height - 1), cut.height)) as tile:
            self._score(part, begin, count, tile)
        with self.across() as v:
            T.buffer_store(self.fade, tirx.exp(self.top[v] - self.peak[v]), [v])
        with self.across() as v:
            T.buffer_store(self.top, self.peak[v], [v])
        with self.across() as v:
            T.buffer_store(self.total, self.total[v] * self.fade[v], [v])
        with T.serial(count) as key:
            with self.across() as v:
                T.buffer_store(self.scores, tirx.exp(self.scores[key, v] - self.peak[v]), [key, v])
            with self.across() as v:
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
            with self.across() as v:
                T.buffer_store(sums, zero, [i, v])
        with T.serial(self.spec.lanes) as e:
            for i, key in enumerate(keys):
                with self.across() as v:
                    T.buffer_store(
                        sums, sums[i, v] + self._element(0, part, begin, key, e) * self.queries[e, v], [i, v]
                    )
        for i, key in enumerate(keys):
            with self.across() as v:
                T.buffer_store(
                    self.scores, self._seen(part.start + begin, key, v, sums[i, v]), [tile * cut.height + i, v]
                )
            with self.across() as v:
                T.buffer_store(self.peak, tirx.max(self.peak[v], self.scores[tile * cut.height + i, v]), [v])

    def _weigh(self, part: Part, begin: Expr, count: Expr, at: Expr | int, depth: int) -> None:
        """Add the weighed values of a block, a few elements of them."""
        sums = self.scratch(depth, self.cut.width)
        for i in range(depth):
            with self.across() as v:
                T.buffer_store(sums, self.sum[at + i, v] * self.fade[v], [i, v])
        with T.serial(count) as key:
            for i in range(depth):
                with self.across() as v:
                    T.buffer_store(
                        sums, sums[i, v] + self._element(1, part, begin, key, at + i) * self.scores[key, v], [i, v]
                    )
        for i in range(depth):
            with self.across() as v:
                T.buffer_store(self.sum, sums[i, v], [at + i, v])

    # Masks -------------------------------------------------------------------------------------------------------

    def _by_row(self, operand: Operand) -> bool:
        """Return whether an operand's values differ between the rows of a tile."""
        return operand.has("query") or (operand.has("group") and self.spec.groups > 1)

    def _stage(self, buffer: Any, operand: Operand, staged: Any, start: Expr, count: Expr) -> None:
        """Turn a block of a mask, so that its rows fill the lanes."""

        def one(r: Expr, key: Expr) -> None:
            T.buffer_store(staged, self.load(buffer, operand, {**self.row_of(r), "key": start + key}), [key, r])

        def many(r: Expr, key: Expr) -> Expr:
            return self.load(buffer, operand, {**self.row_of(r), "key": start + key}, self.cut.lanes)

        self.turn(count, many if operand.runs_along("key") else None, one, staged)

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
        seen = start + key <= query + self.spec.causal
        if self.spec.window is not None:
            seen = tirx.all(seen, start + key > query + self.spec.causal - self.spec.window)
        return tirx.Select(seen, score, self.number(float("-inf")))
