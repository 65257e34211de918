"""Write a fused linear kernel as TIR.

Rows are normed once, into a buffer of their own (an RMS norm without weight leaves x as it is and becomes a factor of
the sums).  Then every group of columns goes over the rows in tiles: sums of products in registers, and on each tile,
still in the first-level cache, the steps behind the sum.  Nothing between x and the results is written to memory
otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from tvm import ir, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..elementary import vectorizable_math
from ..machine import Machine
from .plan import Plan, plan
from .spec import Dim, Output, Rotary, Spec

Expr: TypeAlias = ir.Expr


def _activate(kind: str, x: Expr) -> Expr:
    """Return an activation of a float value."""
    dtype = str(x.ty.dtype)

    def number(value: float) -> Expr:
        return tirx.const(value, dtype)

    if kind == "":
        return x
    if kind == "relu":
        return tirx.max(x, number(0.0))
    if kind == "silu":
        return x * tirx.sigmoid(x)
    if kind == "quick_gelu":
        return x * tirx.sigmoid(x * number(1.702))
    if kind == "sigmoid":
        return tirx.sigmoid(x)
    if kind == "tanh":
        return tirx.tanh(x)
    if kind == "gelu":
        return x * (number(0.5) + number(0.5) * tirx.erf(x * number(math.sqrt(0.5))))
    if kind == "gelu_tanh":
        inner = number(math.sqrt(2 / math.pi)) * (x + number(0.044715) * x * x * x)
        return number(0.5) * x * (number(1.0) + tirx.tanh(inner))
    raise ValueError(f"no activation {kind!r}")


def _unravel(index: Expr, extents: Sequence[int | Expr]) -> list[Expr]:
    """Return the indices of axes from that of all of them in one."""
    out: list[Expr] = []
    for extent in reversed(extents[1:]):
        out.append(tirx.const(0, "int32") if _is_one(extent) else tirx.floormod(index, extent))
        index = index if _is_one(extent) else tirx.floordiv(index, extent)
    return [*([index] if extents else []), *reversed(out)]


def _is_one(extent: int | Expr) -> bool:
    return isinstance(extent, int) and extent == 1


class _Writer:
    """Emits one kernel; the arguments are declared as attributes in the order of :class:`Spec`."""

    def __init__(self, spec: Spec, cut: Plan, lanes: int) -> None:
        self.spec, self.cut, self.lanes = spec, cut, lanes
        self.rows: Expr | int = math.prod(spec.rows) if spec.rows else 1
        dtype, depth = spec.dtype, spec.depth
        x = self._argument("x", (*spec.rows, depth), dtype)
        norm = spec.norm
        self.norm_weight = self._argument("norm_weight", (depth,), dtype) if norm and norm.weight else None
        self.norm_bias = self._argument("norm_bias", (depth,), dtype) if norm and norm.bias else None
        self.weight = self._argument("weight", (cut.groups, depth, cut.width), dtype)
        self.bias = self._argument("bias", (cut.groups, cut.width), dtype) if spec.bias else None
        self.tables: list[list[Any] | None] = []
        self.residuals: list[Any] = []
        for i, output in enumerate(spec.outputs):
            tables = None
            if output.rotary is not None:
                shapes = [self._table(t, output, output.rotary) for t in (output.rotary.cos, output.rotary.sin)]
                tables = [self._argument(f"{n}{i}", s, dtype) for n, s in zip(("cos", "sin"), shapes)]
            self.tables.append(tables)
            added = output.residual
            shape = None if added is None else spec.shape(added, output)
            self.residuals.append(None if shape is None else self._argument(f"residual{i}", shape, dtype))
        self.results = [
            self._argument(f"result{i}", spec.shape(output.dims, output), dtype)
            for i, output in enumerate(spec.outputs)
        ]
        # All arguments come before the first alias.
        self.x = T.decl_buffer((self.rows, depth), dtype, data=x.data, layout=None)
        self.sums = spec.sum_dtype
        self.factor: Any = None
        self.normed: Any = None

    @staticmethod
    def _argument(name: str, shape: Sequence[int | Expr], dtype: str) -> Any:
        return T.arg(name, T.buffer(tuple(shape), dtype, layout=None))

    def _table(self, dims: tuple[Dim, ...], output: Output, rotary: Rotary) -> list[int | Expr]:
        return [*self.spec.shape(dims[:-1], output), rotary.dim // 2 if rotary.half else rotary.dim]

    def _spread(self, extent: int | Expr) -> AbstractContextManager[Expr]:
        return T.parallel(extent) if self.cut.parallel else T.serial(extent)

    def _load(self, buffer: Any, *indices: Expr) -> Expr:
        value = buffer[tuple(indices)]
        return value if str(value.ty.dtype).split("x")[0] == self.sums else value.astype(self.sums)

    # Rows --------------------------------------------------------------------------------------------------------

    def norms(self) -> None:
        """Norm every row, or find its factor."""
        norm, depth = self.spec.norm, self.spec.depth
        if norm is None:
            return
        if norm.scales_sums:
            self.factor = T.alloc_buffer((self.rows,), self.sums, layout=None)
        else:
            self.normed = T.alloc_buffer((self.rows, depth), self.sums, layout=None)
        with self._spread(self.rows) as row:
            mean = None
            if norm.kind == "layer":
                mean = self._total(row, lambda value: value)
                mean = T.bind(mean * tirx.const(1.0 / depth, self.sums))
            centre = (lambda value: value) if mean is None else (lambda value: value - mean)
            squares = self._total(row, lambda value: centre(value) * centre(value))
            spread = squares * tirx.const(1.0 / depth, self.sums) + tirx.const(norm.epsilon, self.sums)
            factor = T.bind(tirx.const(1.0, self.sums) / tirx.sqrt(spread))
            if self.factor is not None:
                T.buffer_store(self.factor, factor, [row])
                return

            def value(k: Expr) -> Expr:
                out = centre(self._load(self.x, row, k)) * factor
                out = out if self.norm_weight is None else out * self._load(self.norm_weight, k)
                return out if self.norm_bias is None else out + self._load(self.norm_bias, k)

            self._along(depth, lambda k: T.buffer_store(self.normed, value(k), [row, k]))

    def _along(self, extent: int, store: Callable[[Expr], None]) -> None:
        """Emit ``store(k)`` for all k, in vectors and a remainder."""
        step = 2 * self.lanes
        if extent >= step:
            with T.serial(extent // step) as chunk, T.vectorized(step) as lane:
                store(chunk * step + lane)
        if extent % step:
            with T.serial(extent % step) as rest:
                store(extent // step * step + rest)

    def _total(self, row: Expr, term: Callable[[Expr], Expr]) -> Expr:
        """Return the sum of a term of each value of a row."""
        step, depth = 4 * self.lanes, self.spec.depth
        whole, rest = divmod(depth, step)
        parts = T.alloc_buffer((step,), self.sums, scope="local", layout=None)
        with T.vectorized(step) as lane:
            T.buffer_store(parts, tirx.const(0.0, self.sums), [lane])
        if whole:
            with T.serial(whole) as chunk, T.vectorized(step) as lane:
                T.buffer_store(parts, parts[lane] + term(self._load(self.x, row, chunk * step + lane)), [lane])
        if rest:
            with T.serial(rest) as k:
                T.buffer_store(parts, parts[k] + term(self._load(self.x, row, whole * step + k)), [k])
        while step > 1:
            step //= 2
            with T.vectorized(step) if step > 1 else T.serial(1) as lane:
                T.buffer_store(parts, parts[lane] + parts[lane + step], [lane])
        return T.bind(parts[0])

    # Columns -----------------------------------------------------------------------------------------------------

    def products(self) -> None:
        """Go over groups of columns, and under each over the rows of a chunk."""
        cut, rows = self.cut, self.rows
        static = isinstance(rows, int)
        chunks = -(-rows // cut.chunk) if static else tirx.floordiv(rows + (cut.chunk - 1), cut.chunk)
        with self._spread(chunks * cut.groups) as unit:
            one = static and chunks == 1
            group = unit if one else T.bind(tirx.floormod(unit, cut.groups))
            start = 0 if one else T.bind(tirx.floordiv(unit, cut.groups) * cut.chunk)
            if static and rows % cut.chunk == 0:
                count: int | Expr = cut.chunk
            else:
                count = rows if one else T.bind(tirx.min(rows - start, cut.chunk))
            tiles, rest = (
                divmod(count, cut.height)
                if isinstance(count, int)
                else (tirx.floordiv(count, cut.height), tirx.floormod(count, cut.height))
            )
            if cut.height > 1 and not (isinstance(tiles, int) and tiles == 0):
                with T.serial(tiles) as tile:
                    self._tile(group, start + tile * cut.height, cut.height, 1)
            if cut.height == 1:
                tiles, rest = 0, count
            if not (isinstance(rest, int) and rest == 0):
                with T.serial(rest) as row:
                    self._tile(group, start + tiles * cut.height + row, 1, cut.partial)

    def _tile(self, group: Expr, row: Expr, height: int, partial: int) -> None:
        """Sum ``height`` rows of one group, in ``partial`` sums each, and apply the steps behind."""
        depth, width, zero = self.spec.depth, self.cut.width, tirx.const(0.0, self.sums)
        source = self.x if self.normed is None else self.normed
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
        done = T.alloc_buffer((height, width), self.sums, scope="local", layout=None)
        for r in range(height):
            with T.vectorized(width) as v:
                total = sums[r * partial, v]
                for part in range(1, partial):
                    total = total + sums[r * partial + part, v]
                total = total if self.factor is None else total * self.factor[row + r]
                total = total if self.bias is None else total + self._load(self.bias, group, v)
                T.buffer_store(done, total, [r, v])
        # A loop, not copies: an index that is not a number would keep the sums out of registers, `done` may wait.
        with T.serial(height) as r:
            self._choose(0, group, row + r, lambda v: done[r, v])

    # Results -----------------------------------------------------------------------------------------------------

    def _choose(self, number: int, group: Expr, row: Expr, value: Callable[[Expr], Expr]) -> None:
        """Emit the steps of the output that a group belongs to."""
        last = number + 1 == len(self.spec.outputs)
        if last:
            self._finish(number, group, row, value)
            return
        with T.If(group < self.cut.columns[number + 1].start):
            with T.Then():
                self._finish(number, group, row, value)
            with T.Else():
                self._choose(number + 1, group, row, value)

    def _finish(self, number: int, group: Expr, row: Expr, value: Callable[[Expr], Expr]) -> None:
        output, columns = self.spec.outputs[number], self.cut.columns[number]
        local = group - columns.start
        head = tirx.floordiv(local, columns.per_head)
        within = tirx.floormod(local, columns.per_head)
        heads = _unravel(head, output.heads)
        rows = _unravel(row, self.spec.rows)

        def index(dims: Sequence[Dim], lane: Expr) -> list[Expr]:
            found = {"row": rows, "head": heads, "lane": [lane], "unit": [tirx.const(0, "int32")]}
            return [found[kind][i] for kind, i in dims]

        def store(result: Expr, lane: Expr) -> None:
            residual = self.residuals[number]
            if residual is not None and output.residual is not None:
                result = result + self._load(residual, *index(output.residual, lane))
            result = result if self.sums == self.spec.dtype else result.astype(self.spec.dtype)
            T.buffer_store(self.results[number], result, index(output.dims, lane))

        def scaled(result: Expr) -> Expr:
            return result if output.scale == 1.0 else result * tirx.const(output.scale, self.sums)

        def pair(first: Expr, v: Expr) -> None:
            half = self.cut.width // 2
            if output.gate is not None:
                store(scaled(_activate(output.activation, value(v)) * value(v + half)), first + v)
                return
            self._rotate(
                number, [scaled(_activate(output.activation, value(v + o))) for o in (0, half)], first + v, index, store
            )

        def single(first: Expr, v: Expr) -> None:
            store(scaled(_activate(output.activation, value(v))), first + v)

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
        number: int,
        values: Sequence[Expr],
        pair: Expr,
        index: Callable[[Sequence[Dim], Expr], list[Expr]],
        store: Callable[[Expr, Expr], None],
    ) -> None:
        """Store a pair of lanes, turned."""
        rotary, tables = self.spec.outputs[number].rotary, self.tables[number]
        assert rotary is not None and tables is not None
        apart = rotary.convention == "half-split"
        lanes = (pair, pair + rotary.dim // 2) if apart else (pair * 2, pair * 2 + 1)
        cos, sin = (
            [self._load(table, *index(dims, pair if rotary.half else lane)) for lane in lanes]
            for table, dims in zip(tables, (rotary.cos, rotary.sin))
        )
        store(values[0] * cos[0] - values[1] * sin[0], lanes[0])
        store(values[1] * cos[1] + values[0] * sin[1], lanes[1])


def kernel(spec: Spec, machine: Machine) -> tirx.PrimFunc:
    """Write the kernel.

    Parameters
    ----------
    spec : Spec
    machine : Machine

    Returns
    -------
    tvm.tirx.PrimFunc
        Takes and returns through its arguments, see :class:`Spec`; marked as scheduled, so that no rule touches it.
    """
    cut = plan(spec, machine)
    with IRBuilder() as builder:
        with T.prim_func(private=True):
            T.func_name("fused_linear")
            T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True, "op_pattern": 8})
            writer = _Writer(spec, cut, machine.lanes(spec.sum_dtype))
            writer.norms()
            writer.products()
    return vectorizable_math(builder.get())
