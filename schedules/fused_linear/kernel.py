"""Write a fused linear kernel as TIR.

Rows are normed, turned and widened once, into a buffer of their own (an RMS norm without weight alone becomes a
factor of the sums).  Then every group of columns goes over the rows in tiles: sums of products in registers, and on
each tile, still in the first-level cache, the steps behind the sum.  Where heads are normed, the tile's sums of a whole
head are kept until the last of its groups is there.  Nothing between x and the results is written to memory otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, TypeAlias

from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from ..activations import activate
from ..elementary import vectorizable_math
from ..loops import along, sum_along, unravel
from ..machine import Machine
from ..writing import argument, cast, writing
from .plan import Plan, plan
from .spec import Dim, Norm, Output, Rotary, Spec, Turn

Expr: TypeAlias = ir.Expr


def _index(dims: Sequence[Dim], rows: Sequence[Expr], heads: Sequence[Expr], lane: Expr) -> list[Expr]:
    """Return the indices that dimensions stand for."""
    found = {"row": rows, "head": heads, "lane": [lane], "unit": [tirx.const(0, "int32")]}
    return [found[kind][i] for kind, i in dims]


def _lanes_of_pair(rotary: Rotary, pair: Expr) -> tuple[Expr, Expr]:
    """Return the two lanes that turn together."""
    return (pair, pair + rotary.dim // 2) if rotary.convention == "half-split" else (pair * 2, pair * 2 + 1)


class _Writer:
    """Emits one kernel; the arguments are declared as attributes in the order of :class:`Spec`."""

    def __init__(self, spec: Spec, cut: Plan, lanes: int) -> None:
        self.spec, self.cut, self.lanes = spec, cut, lanes
        self.rows: Expr | int = math.prod(spec.rows) if spec.rows else 1
        dtype, depth = spec.dtype, spec.depth
        x = argument("x", (*spec.rows, depth), dtype)
        norm = spec.norm
        self.norm = self._affine("", norm, depth)
        turn = spec.turn
        self.turn_tables = None if turn is None else self._tables("_x", turn, turn.rotary)
        self.weight = argument("weight", (cut.groups, depth, cut.width), dtype)
        self.bias = argument("bias", (cut.groups, cut.width), dtype) if spec.bias else None
        self.norms_of_heads: list[tuple[Any, Any]] = []
        self.tables: list[list[Any] | None] = []
        self.residuals: list[Any] = []
        for i, output in enumerate(spec.outputs):
            self.norms_of_heads.append(self._affine(str(i), output.norm, output.lanes))
            rotary = output.rotary
            self.tables.append(None if rotary is None else self._tables(str(i), output, rotary))
            added = output.residual
            shape = None if added is None else spec.shape(added, output)
            self.residuals.append(None if shape is None else argument(f"residual{i}", shape, dtype))
        self.results = [
            argument(f"result{i}", spec.shape(output.dims, output), dtype) for i, output in enumerate(spec.outputs)
        ]
        # All arguments come before the first alias.
        self.x = T.decl_buffer((self.rows, depth), dtype, data=x.data, layout=None)
        self.sums = spec.sum_dtype
        self.factor: Any = None
        self.ready: Any = None

    def _affine(self, name: str, norm: Norm | None, extent: int) -> tuple[Any, Any]:
        """Declare a norm's weight and bias, those that are there."""
        wanted = (False, False) if norm is None else (norm.weight, norm.bias)
        dtype = norm.dtype if norm is not None and norm.dtype else self.spec.dtype
        weight, bias = (
            argument(f"norm_{part}{name}", (extent,), dtype) if there else None
            for part, there in zip(("weight", "bias"), wanted)
        )
        return weight, bias

    def _tables(self, name: str, of: Output | Turn, rotary: Rotary) -> list[Any]:
        """Declare cos and sin of a rotation."""
        last = rotary.dim // 2 if rotary.half else rotary.dim
        return [
            argument(f"{n}{name}", (*self.spec.shape(dims[:-1], of), last), rotary.dtype or self.spec.dtype)
            for n, dims in (("cos", rotary.cos), ("sin", rotary.sin))
        ]

    @staticmethod
    def _spread(extent: int | Expr, parallel: bool) -> AbstractContextManager[Expr]:
        return T.parallel(extent) if parallel else T.serial(extent)

    def _load(self, buffer: Any, *indices: Expr) -> Expr:
        return cast(buffer[tuple(indices)], self.sums)

    # Rows --------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Norm, turn and widen every row; or find the factor that a norm is."""
        norm, turn, depth = self.spec.norm, self.spec.turn, self.spec.depth
        if not self.spec.prepares:
            return
        if norm is not None and norm.scales_sums:
            self.factor = T.alloc_buffer((self.rows,), self.sums, layout=None)
        if turn is not None or self.factor is None or self.spec.dtype != self.sums:
            self.ready = T.alloc_buffer((self.rows, depth), self.sums, layout=None)
        with self._spread(self.rows, self.cut.parallel_rows) as row:

            def x(k: Expr) -> Expr:
                return self._load(self.x, row, k)

            value: Callable[[Expr], Expr] = x
            if norm is not None:
                value, factor = self._normed(norm, self.norm, depth, x)
                if self.factor is not None:
                    T.buffer_store(self.factor, factor, [row])
                    value = x
            if turn is not None:
                self._turned(turn, row, value)
            elif self.ready is not None:
                along(depth, self.lanes, lambda k: T.buffer_store(self.ready, value(k), [row, k]))

    def _normed(
        self, norm: Norm, affine: tuple[Any, Any], extent: int, x: Callable[[Expr], Expr]
    ) -> tuple[Callable[[Expr], Expr], Expr]:
        """Return what a norm makes of each of ``extent`` values, and its factor."""
        mean = None
        if norm.kind == "layer":
            mean = sum_along(extent, self.lanes, self.sums, x)
            mean = T.bind(mean * tirx.const(1.0 / extent, self.sums))

        def centred(k: Expr) -> Expr:
            return x(k) if mean is None else x(k) - mean

        squares = sum_along(extent, self.lanes, self.sums, lambda k: centred(k) * centred(k))
        spread = squares * tirx.const(1.0 / extent, self.sums) + tirx.const(norm.epsilon, self.sums)
        factor = T.bind(tirx.const(1.0, self.sums) / tirx.sqrt(spread))
        weight, bias = affine

        def value(k: Expr) -> Expr:
            out = centred(k) * factor
            out = out if weight is None else out * self._load(weight, k)
            return out if bias is None else out + self._load(bias, k)

        return value, factor

    def _turned(self, turn: Turn, row: Expr, value: Callable[[Expr], Expr]) -> None:
        """Store one row of x, turned."""
        rotary, rows = turn.rotary, unravel(row, self.spec.rows)
        with T.serial(math.prod(turn.heads)) as head:
            heads = unravel(head, turn.heads)
            start: Expr = tirx.const(0, "int32")
            for i, stride in zip(heads, turn.strides):
                start = start + i * stride

            def index(dims: Sequence[Dim], lane: Expr) -> list[Expr]:
                return _index(dims, rows, heads, lane)

            def store(result: Expr, lane: Expr) -> None:
                T.buffer_store(self.ready, result, [row, start + lane])

            def pair(first: Expr) -> None:
                values = [value(start + lane) for lane in _lanes_of_pair(rotary, first)]
                self._rotate(rotary, self.turn_tables, values, first, index, store)

            along(rotary.dim // 2, self.lanes, pair)
            rest = turn.lanes - rotary.dim
            along(rest, self.lanes, lambda k: store(value(start + (k + rotary.dim)), k + rotary.dim))

    # Columns -----------------------------------------------------------------------------------------------------

    def products(self) -> None:
        """Go over units of columns, and under each over the rows of a chunk."""
        cut, rows = self.cut, self.rows
        chunk, chunks = self._chunks()
        one = isinstance(chunks, int) and chunks == 1
        with self._spread(chunks * cut.units, cut.parallel) as at:
            unit = at if one else T.bind(tirx.floormod(at, cut.units))
            start = 0 if one else T.bind(tirx.floordiv(at, cut.units) * chunk)
            count = rows if one else T.bind(tirx.min(rows - start, chunk))
            self._unit(0, unit, start, count)

    def _chunks(self) -> tuple[int | Expr, int | Expr]:
        """Return the rows of a chunk and the number of chunks, all of nearly the same size."""
        cut, rows = self.cut, self.rows
        if isinstance(rows, int):
            return cut.chunk, -(-rows // cut.chunk)

        def ceildiv(a: Expr, b: Expr | int) -> Expr:
            return tirx.floordiv(a + (b - 1), b)

        pieces = T.bind(tirx.max(ceildiv(rows, cut.chunk), cut.pieces))
        tiles = T.bind(tirx.max(ceildiv(ceildiv(rows, pieces), cut.height), 1))
        return tiles * cut.height, ceildiv(rows, tiles * cut.height)

    def _unit(self, number: int, unit: Expr, start: Expr | int, count: Expr | int) -> None:
        """Emit the work of the unit, which is of output ``number`` or of one behind it."""
        outputs, columns = self.spec.outputs, self.cut.columns
        until = number + 1
        if outputs[number].norm is None:
            # Units of outputs side by side are groups: one loop for all of them.
            while until < len(outputs) and outputs[until].norm is None:
                until += 1

        def work() -> None:
            shift = columns[number].start - columns[number].unit
            if outputs[number].norm is None:
                group = unit + shift if shift else unit
                if self.cut.abreast > 1:
                    self._abreast(range(number, until), unit * self.cut.abreast)
                    return
                self._tiles(start, count, lambda *tile: self._tile(range(number, until), group, *tile))
            else:
                head = unit - columns[number].unit
                self._tiles(start, count, lambda *tile: self._head(number, head, *tile))

        if until == len(outputs):
            work()
            return
        with T.If(unit < columns[until].unit):
            with T.Then():
                work()
            with T.Else():
                self._unit(until, unit, start, count)

    def _tiles(self, start: Expr | int, count: Expr | int, emit: Callable[[Expr, Expr | int], None]) -> None:
        """Emit ``emit(row, height)`` for the tiles of a chunk; the last one may be lower than the others."""
        height = self.cut.height
        tiles = -(-count // height) if isinstance(count, int) else tirx.floordiv(count + (height - 1), height)
        with T.serial(tiles) as tile:
            here = T.bind(tirx.min(count - tile * height, height)) if self.cut.rests else height
            emit(start + tile * height, here)

    def _tile(self, outputs: range, group: Expr, row: Expr, height: Expr | int) -> None:
        """Sum rows of one group, which belongs to one of ``outputs``, and apply the steps behind."""
        done = self._summed(group, row, height)
        # A loop, not copies: an index that is not a number would keep the sums out of registers, `done` may wait.
        with T.serial(height) as r:
            self._choose(outputs, group, row + r, lambda v: done[r, v])

    def _summed(self, group: Expr, row: Expr, height: Expr | int) -> Any:
        """Return the sums of a tile's rows of one group."""
        done = T.alloc_buffer((self.cut.height, self.cut.width), self.sums, scope="local", layout=None)

        def choose(heights: Sequence[int]) -> None:
            if len(heights) == 1:
                self._sum(done, group, row, heights[0])
                return
            with T.If(height == heights[0]):
                with T.Then():
                    self._sum(done, group, row, heights[0])
                with T.Else():
                    choose(heights[1:])

        choose([self.cut.height, *self.cut.rests])
        return done

    def _sum(self, done: Any, group: Expr, row: Expr, height: int) -> None:
        """Sum ``height`` rows, each in as many sums as keep the adders busy."""
        depth, width, zero = self.spec.depth, self.cut.width, tirx.const(0.0, self.sums)
        partial = self.cut.partial(height)
        source = self.x if self.ready is None else self.ready
        sums = T.alloc_buffer((height * partial, width), self.sums, scope="local", layout=None)
        for i in range(height * partial):
            with T.vectorized(width) as v:
                T.buffer_store(sums, zero, [i, v])

        def step(k: Expr | int, part: int) -> None:
            for r in range(height):
                at = r * partial + part
                with T.vectorized(width) as v:
                    term = self._load(source, row + r, k) * self._load(self.weight, group, k, v)
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

    def _abreast(self, outputs: range, first: Expr) -> None:
        """Sum the only row there is of neighbouring groups, and apply the steps behind."""
        cut, zero = self.cut, tirx.const(0.0, self.sums)
        source = self.x if self.ready is None else self.ready
        full = cut.groups % cut.abreast == 0
        # In the place of a group that there is not, the last one is summed once more.
        groups = [first + i if full else T.bind(tirx.min(first + i, cut.groups - 1)) for i in range(cut.abreast)]
        sums = T.alloc_buffer((cut.abreast, cut.width), self.sums, scope="local", layout=None)
        done = T.alloc_buffer((cut.abreast, cut.width), self.sums, scope="local", layout=None)
        for i in range(cut.abreast):
            with T.vectorized(cut.width) as v:
                T.buffer_store(sums, zero, [i, v])
        with T.serial(self.spec.depth) as k:
            for i, group in enumerate(groups):
                with T.vectorized(cut.width) as v:
                    term = self._load(source, 0, k) * self._load(self.weight, group, k, v)
                    T.buffer_store(sums, sums[i, v] + term, [i, v])
        for i, group in enumerate(groups):
            with T.vectorized(cut.width) as v:
                T.buffer_store(done, self._whole(sums[i, v], group, 0, v), [i, v])
        with T.serial(cut.abreast if full else tirx.min(cut.groups - first, cut.abreast)) as i:
            self._choose(outputs, first + i, tirx.const(0, "int32"), lambda v: done[i, v])

    def _whole(self, total: Expr, group: Expr, row: Expr | int, v: Expr) -> Expr:
        """Return a sum with the row's factor and the column's bias."""
        total = total if self.factor is None else total * self.factor[row]
        return total if self.bias is None else total + self._load(self.bias, group, v)

    def _head(self, number: int, head: Expr, row: Expr, height: Expr | int) -> None:
        """Sum rows of a whole head, norm each, and apply the steps behind."""
        output, columns = self.spec.outputs[number], self.cut.columns[number]
        norm, rotary, lanes = output.norm, output.rotary, output.lanes
        assert norm is not None
        whole = T.alloc_buffer((self.cut.height, lanes), self.sums, scope="local", layout=None)
        with T.serial(columns.per_head) as part:
            done = self._summed(columns.start + head * columns.per_head + part, row, height)
            with T.serial(height) as r:

                def keep(first: Expr, v: Expr) -> None:
                    kept = self._scaled(output, activate(output.activation, done[r, v]))
                    T.buffer_store(whole, kept, [r, first + v])

                self._lanes(part * self.cut.width, lanes, self.cut.width, keep)
        with T.serial(height) as r:
            index, store = self._places(number, unravel(head, output.heads), row + r)
            value, _ = self._normed(norm, self.norms_of_heads[number], lanes, lambda k: whole[r, k])
            turned = 0
            if rotary is not None:
                turned = rotary.dim

                def pair(first: Expr) -> None:
                    values = [value(lane) for lane in _lanes_of_pair(rotary, first)]
                    self._rotate(rotary, self.tables[number], values, first, index, store)

                along(turned // 2, self.lanes, pair)
            along(lanes - turned, self.lanes, lambda k: store(value(k + turned), k + turned))

    # Results -----------------------------------------------------------------------------------------------------

    def _choose(self, outputs: range, group: Expr, row: Expr, value: Callable[[Expr], Expr]) -> None:
        """Emit the steps of the output that a group belongs to."""
        if len(outputs) == 1:
            self._finish(outputs[0], group, row, value)
            return
        with T.If(group < self.cut.columns[outputs[1]].start):
            with T.Then():
                self._finish(outputs[0], group, row, value)
            with T.Else():
                self._choose(outputs[1:], group, row, value)

    def _finish(self, number: int, group: Expr, row: Expr, value: Callable[[Expr], Expr]) -> None:
        output, columns = self.spec.outputs[number], self.cut.columns[number]
        local = group - columns.start
        head = tirx.floordiv(local, columns.per_head)
        within = tirx.floormod(local, columns.per_head)
        index, store = self._places(number, unravel(head, output.heads), row)

        def result(value: Expr) -> Expr:
            return self._scaled(output, value)

        def pair(first: Expr, v: Expr) -> None:
            half = self.cut.width // 2
            if output.gate is not None:
                store(result(activate(output.activation, value(v)) * value(v + half)), first + v)
                return
            assert output.rotary is not None
            values = [result(activate(output.activation, value(v + o))) for o in (0, half)]
            self._rotate(output.rotary, self.tables[number], values, first + v, index, store)

        def single(first: Expr, v: Expr) -> None:
            store(result(activate(output.activation, value(v))), first + v)

        half, width = self.cut.width // 2, self.cut.width
        turned = 0 if output.rotary is None else output.rotary.dim
        paired = output.lanes if output.gate is not None else turned // 2
        with_pairs, without = columns.pairs > 0, columns.per_head > columns.pairs
        if with_pairs and without:
            with T.If(within < columns.pairs):
                with T.Then():
                    self._lanes(within * half, paired, half, pair)
                with T.Else():
                    first = (within - columns.pairs) * width
                    self._lanes(first, output.lanes - turned, width, lambda f, v: single(f + turned, v))
        elif with_pairs:
            self._lanes(within * half, paired, half, pair)
        else:
            self._lanes(within * width, output.lanes, width, single)

    def _scaled(self, output: Output, value: Expr) -> Expr:
        return value if output.scale == 1.0 else value * tirx.const(output.scale, self.sums)

    def _places(
        self, number: int, heads: Sequence[Expr], row: Expr
    ) -> tuple[Callable[[Sequence[Dim], Expr], list[Expr]], Callable[[Expr, Expr], None]]:
        """Return the indices of a lane of one head and row, and what stores a result there, the residual added."""
        output, rows = self.spec.outputs[number], unravel(row, self.spec.rows)

        def index(dims: Sequence[Dim], lane: Expr) -> list[Expr]:
            return _index(dims, rows, heads, lane)

        def store(result: Expr, lane: Expr) -> None:
            residual = self.residuals[number]
            if residual is not None and output.residual is not None:
                result = result + self._load(residual, *index(output.residual, lane))
            T.buffer_store(self.results[number], cast(result, self.spec.dtype), index(output.dims, lane))

        return index, store

    @staticmethod
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

    def _rotate(
        self,
        rotary: Rotary,
        tables: Sequence[Any] | None,
        values: Sequence[Expr],
        pair: Expr,
        index: Callable[[Sequence[Dim], Expr], list[Expr]],
        store: Callable[[Expr, Expr], None],
    ) -> None:
        """Store a pair of lanes, turned."""
        assert tables is not None
        lanes = _lanes_of_pair(rotary, pair)
        cos, sin = (
            [self._load(table, *index(dims, pair if rotary.half else lane)) for lane in lanes]
            for table, dims in zip(tables, (rotary.cos, rotary.sin))
        )
        store(values[0] * cos[0] - values[1] * sin[0], lanes[0])
        store(values[1] * cos[1] + values[0] * sin[1], lanes[1])


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
    cut = plan(spec, machine)
    with writing("fused_linear") as builder:
        writer = _Writer(spec, cut, machine.lanes(spec.sum_dtype))
        if isinstance(writer.rows, int) and writer.rows == 0:
            # TVM cannot lower loops of no turns with buffers in them.
            T.evaluate(tirx.const(0, "int32"))
        else:
            writer.prepare()
            writer.products()
    return vectorizable_math(builder.get())
