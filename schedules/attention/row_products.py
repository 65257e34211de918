"""Products of a few rows with keys and values, along whichever of elements and keys are neighbours in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .lanes import summed
from .spec import Extent
from .writer import Expr, Part, Roles, Writer


class RowProducts(Writer):
    """Emits scores and weighed values of a block of keys.

    Attributes
    ----------
    unit : dict
        Roles that a unit of work fixes.
    queries, sum, scores, fade : buffer
        (rows, lanes), (rows, value lanes), (rows, keys of a block), (rows).
    """

    unit: Roles
    queries: Any
    sum: Any
    scores: Any
    fade: Any

    def _spot(self, first: Extent, lanes: int) -> Extent:
        return tirx.Ramp(first, 1, lanes) if lanes > 1 else first

    def _alike(self, value: Expr, lanes: int) -> Expr:
        return tirx.Broadcast(value, lanes) if lanes > 1 else value

    def _zeros(self, count: int, lanes: int) -> Any:
        """Return so many vectors of zeros, in registers."""
        sums = self.scratch(count, lanes)
        for i in range(count):
            with T.vectorized(lanes) as v:
                T.buffer_store(sums, self.number(0.0), [i, v])
        return sums

    @contextmanager
    def _each(self, extent: Extent, step: int, first: Extent = 0) -> Iterator[Expr]:
        """Go over the multiples of ``step`` below ``extent``, ``first`` and what follows by whole steps."""
        with T.serial(tirx.floordiv(extent - first, step)) as at:
            yield first + at * step

    # Keys --------------------------------------------------------------------------------------------------------

    def score(self, part: Part, begin: Expr, count: Expr, rows: range) -> None:
        """Sum the products of a block's keys with a few rows; behind the last key there may be anything."""
        operand, lanes = self.spec.k[part.index], self.cut.lanes
        if lanes > 1 and operand.runs_along("key") and not operand.runs_along("lane"):
            self._score_along_keys(part, begin, count, rows)
        else:
            self._score_along_lanes(part, begin, count, rows)

    def _key(self, part: Part, roles: Roles, lanes: int = 1) -> Expr:
        return self.load(self.k[part.index], self.spec.k[part.index], {**self.unit, **roles}, lanes)

    def _score_along_keys(self, part: Part, begin: Expr, count: Expr, rows: range) -> None:
        """Give each lane a key."""
        lanes, height = self.cut.lanes, self.cut.height

        def together(first: Expr, vectors: int) -> None:
            sums = self._zeros(len(rows) * vectors, lanes)
            with T.serial(self.spec.lanes) as e:
                queries = [T.bind(self._alike(self.queries[row, e], lanes)) for row in rows]
                for i in range(vectors):
                    loaded = T.bind(self._key(part, {"key": begin + first + i * lanes, "lane": e}, lanes))
                    for j, query in enumerate(queries):
                        spot = [j * vectors + i, self._spot(0, lanes)]
                        T.buffer_store(sums, sums[tuple(spot)] + loaded * query, spot)
            for j, row in enumerate(rows):
                for i in range(vectors):
                    value = sums[j * vectors + i, self._spot(0, lanes)]
                    T.buffer_store(self.scores, value, [row, self._spot(first + i * lanes, lanes)])

        many = T.bind(tirx.floordiv(count, lanes * height) * (lanes * height))
        with self._each(many, lanes * height) as first:
            together(first, height)
        with T.If(count >= lanes):
            # Of the last vector some scores are known already.
            with T.Then(), self._each(count + (lanes - 1), lanes, many) as first:
                together(T.bind(tirx.min(first, count - lanes)), 1)
            with T.Else(), T.serial(count) as key:
                for row in rows:
                    T.buffer_store(self.scores, self.number(0.0), [row, key])
                self._score_rest(part, begin, [key], key, 0, rows)

    def _score_along_lanes(self, part: Part, begin: Expr, count: Expr, rows: range) -> None:
        """Give each lane an element; then sums go over the lanes."""
        lanes, height = self.cut.lanes, self.cut.height
        vectors = self.spec.lanes // lanes if lanes > 1 and self.spec.k[part.index].runs_along("lane") else 0
        with T.serial(tirx.floordiv(count + (lanes - 1), lanes)) as step:
            for first in range(0, lanes, height):
                at = step * lanes + first
                # Behind the last key it is taken again; what it gives is hidden afterwards.
                keys = [T.bind(tirx.min(at + i, count - 1)) for i in range(height)]
                if vectors:
                    self._score_vectors(part, begin, keys, at, vectors, rows)
                else:
                    for row in rows:
                        for i in range(height):
                            T.buffer_store(self.scores, self.number(0.0), [row, at + i])
                self._score_rest(part, begin, keys, at, vectors * lanes, rows)

    def _score_vectors(
        self, part: Part, begin: Expr, keys: Sequence[Expr], at: Expr, vectors: int, rows: range
    ) -> None:
        lanes, height = self.cut.lanes, len(keys)
        sums = self._zeros(len(rows) * height, lanes)
        with T.serial(vectors) as chunk:
            for i, key in enumerate(keys):
                loaded = T.bind(self._key(part, {"key": begin + key, "lane": chunk * lanes}, lanes))
                for j, row in enumerate(rows):
                    spot = [j * height + i, self._spot(0, lanes)]
                    query = self.queries[row, self._spot(chunk * lanes, lanes)]
                    T.buffer_store(sums, sums[tuple(spot)] + loaded * query, spot)
        for j, row in enumerate(rows):
            of_row = [sums[j * height + i, self._spot(0, lanes)] for i in range(height)]
            T.buffer_store(self.scores, summed(of_row, lanes), [row, self._spot(at, height)])

    def _score_rest(
        self, part: Part, begin: Expr, keys: Sequence[Expr], at: Expr, first_lane: int, rows: range
    ) -> None:
        """Add the products of single elements to scores that stand from ``at`` on."""
        if first_lane == self.spec.lanes:
            return
        with T.serial(self.spec.lanes - first_lane) as rest:
            e = first_lane + rest
            for i, key in enumerate(keys):
                loaded = T.bind(self._key(part, {"key": begin + key, "lane": e}))
                for row in rows:
                    value = self.scores[row, at + i] + loaded * self.queries[row, e]
                    T.buffer_store(self.scores, value, [row, at + i])

    # Values ------------------------------------------------------------------------------------------------------

    def weigh(self, part: Part, begin: Expr, count: Expr, rows: range) -> None:
        """Add the weighed values of a block to a few rows, what these had before scaled down."""
        operand, lanes, extent = self.spec.v[part.index], self.cut.lanes, self.spec.value_lanes
        if lanes > 1 and operand.runs_along("key") and not operand.runs_along("lane"):
            self._in_stretches(extent, self.cut.height, 1, self._weigh_along_keys, part, begin, count, rows)
            self._weigh_rest(part, begin, count, rows)
        else:
            self._in_stretches(extent, self.cut.depth, lanes, self._weigh_along_lanes, part, begin, count, rows)

    @staticmethod
    def _in_stretches(extent: int, length: int, unit: int, emit: Callable[..., None], *args: Any) -> None:
        """Emit ``emit(first, elements, *args)`` for stretches, one of whole units, and single elements."""
        whole, rest = divmod(extent, length)
        if whole:
            with T.serial(whole) as tile:
                emit(tile * length, length, *args)
        if unit > 1 and rest // unit:
            emit(whole * length, rest // unit * unit, *args)
            rest %= unit
        if rest:
            with T.serial(rest) as e:
                emit(extent - rest + e, 1, *args)

    def _value(self, part: Part, roles: Roles, lanes: int) -> Expr:
        """Return elements of a value, or of neighbouring ones, from wherever they lie."""
        buffer, operand = self.v[part.index], self.spec.v[part.index]
        roles = {**self.unit, **roles}
        if lanes == 1 or operand.runs_along("lane") or operand.runs_along("key"):
            return self.load(buffer, operand, roles, lanes)
        single = [self.load(buffer, operand, {**roles, "lane": roles["lane"] + i}) for i in range(lanes)]
        return tirx.Shuffle(single, [tirx.const(i, "int32") for i in range(lanes)])

    def _weigh_along_keys(self, at: Extent, elements: int, part: Part, begin: Expr, count: Expr, rows: range) -> None:
        """Give each lane a key; then sums go over the lanes."""
        lanes = self.cut.lanes
        sums = self._zeros(len(rows) * elements, lanes)

        def add(first: Expr, known: Expr | None = None) -> None:
            weights = [self.scores[row, self._spot(first, lanes)] for row in rows]
            if known is not None:
                fresh = tirx.Ramp(0, 1, lanes) >= tirx.Broadcast(known, lanes)
                weights = [tirx.Select(fresh, w, self._alike(self.number(0.0), lanes)) for w in weights]
            weights = [T.bind(weight) for weight in weights]
            for i in range(elements):
                loaded = T.bind(self._value(part, {"key": begin + first, "lane": at + i}, lanes))
                for j, weight in enumerate(weights):
                    spot = [j * elements + i, self._spot(0, lanes)]
                    T.buffer_store(sums, sums[tuple(spot)] + loaded * weight, spot)

        with self._each(count, lanes) as first:
            add(first)
        rest = tirx.floormod(count, lanes)
        with T.If(tirx.all(rest != 0, count >= lanes)), T.Then():
            add(count - lanes, T.bind(tirx.Cast("int32", lanes - rest)))
        for j, row in enumerate(rows):
            of_row = [sums[j * elements + i, self._spot(0, lanes)] for i in range(elements)]
            old = self.sum[row, self._spot(at, elements)] * self._alike(self.fade[row], elements)
            T.buffer_store(self.sum, old + summed(of_row, lanes), [row, self._spot(at, elements)])

    def _weigh_rest(self, part: Part, begin: Expr, count: Expr, rows: range) -> None:
        """Add the values of keys that are too few for a vector."""
        with T.If(count < self.cut.lanes), T.Then(), T.serial(self.spec.value_lanes) as e, T.serial(count) as key:
            loaded = T.bind(self._value(part, {"key": begin + key, "lane": e}, 1))
            for row in rows:
                T.buffer_store(self.sum, self.sum[row, e] + loaded * self.scores[row, key], [row, e])

    def _weigh_along_lanes(self, at: Extent, depth: int, part: Part, begin: Expr, count: Expr, rows: range) -> None:
        """Give each lane an element."""
        lanes = self.cut.lanes if depth > 1 else 1
        vectors = depth // lanes
        # One sum alone would wait for itself.
        apart = 2 if len(rows) * vectors <= 4 else 1
        sums = self.scratch(apart * len(rows), depth)
        for j, row in enumerate(rows):
            for n in range(vectors):
                old = self.sum[row, self._spot(at + n * lanes, lanes)] * self._alike(self.fade[row], lanes)
                T.buffer_store(sums, old, [j * apart, self._spot(n * lanes, lanes)])
                for other in range(1, apart):
                    zero = self._alike(self.number(0.0), lanes)
                    T.buffer_store(sums, zero, [j * apart + other, self._spot(n * lanes, lanes)])

        def add(key: Expr, which: int) -> None:
            weights = [T.bind(self._alike(self.scores[row, key], lanes)) for row in rows]
            for n in range(vectors):
                loaded = T.bind(self._value(part, {"key": begin + key, "lane": at + n * lanes}, lanes))
                for j, weight in enumerate(weights):
                    spot = [j * apart + which, self._spot(n * lanes, lanes)]
                    T.buffer_store(sums, sums[tuple(spot)] + loaded * weight, spot)

        with T.serial(tirx.floordiv(count, apart)) as pair:
            for which in range(apart):
                add(pair * apart + which, which)
        if apart > 1:
            with T.If(tirx.floormod(count, apart) != 0), T.Then():
                add(count - 1, 0)
        for j, row in enumerate(rows):
            for n in range(vectors):
                total = sums[j * apart, self._spot(n * lanes, lanes)]
                for other in range(1, apart):
                    total = total + sums[j * apart + other, self._spot(n * lanes, lanes)]
                T.buffer_store(self.sum, total, [row, self._spot(at + n * lanes, lanes)])
