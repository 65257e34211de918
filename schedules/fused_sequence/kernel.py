"""Write a sequence kernel as TIR.

Rows that exist, and rows of tables, are copied in vectors.  A linear layer is the fused linear kernel's own body, with
its stores sent to the rows of the sequence that are its.  Where rows stand wherever a mask is true, one walk over the
mask says which row takes which, and for a linear layer the other way round where each of its rows goes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Several
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import tvm_ffi
from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from ..elementary import vectorizable_math
from ..fused_linear import own_kernel as fused_linear
from ..loops import along, unravel
from ..machine import Machine
from ..steps import ASSUMED_EXTENT, MOVED, PARALLEL_MIN_WORK
from ..writing import argument, cast, writing
from .spec import Addend, Copy, Layer, Lookup, Part, Product, Sequence, Size

Expr: TypeAlias = ir.Expr
#: Gives a value a name, where statements are being written.
Keep: TypeAlias = Callable[[Expr], Expr]
#: From a row of a part, its indices and its number, to its indices in the sequence, and whether it goes there.
Place: TypeAlias = Callable[[Several[Expr], Expr], tuple[list[Expr], Expr | None]]

#: Registers that one turn of a copying loop fills.
_REGISTERS = 4
#: Stands, with the number of a product, where its body goes.
_HERE = -1000


@dataclass
class _Operands:
    """The buffers of a part, an addend or a layer, in the order of their arguments; the first ones are what is read."""

    main: list[Any] = field(default_factory=list)
    addends: list[_Operands] = field(default_factory=list)
    #: A product's function and its stand-in.
    func: tirx.PrimFunc | None = None
    number: int = 0


def _count(extents: Several[Size]) -> Size:
    total: Size = 1
    for extent in extents:
        total = extent if isinstance(total, int) and total == 1 else total * extent
    return total


def _wide(value: Size) -> Expr:
    return tirx.const(value, "int64") if isinstance(value, int) else value.astype("int64")


class _Writer:
    def __init__(self, spec: Sequence, machine: Machine) -> None:
        self.spec, self.machine = spec, machine
        self.sums, self.lanes = spec.sum_dtype, machine.lanes(spec.dtype)
        self.products: list[tuple[_Operands, Callable[[tirx.BufferStore], tirx.Stmt]]] = []
        self._arguments = 0
        self.parts = [self._part(part) for part in spec.parts]
        self.layers = [self._layer(layer) for layer in spec.layers]
        self.addends = [self._addend(addend) for addend in spec.addends]
        self.result = argument("result", (*spec.rows, spec.width), spec.dtype)
        # All arguments come before the first alias.
        for operands, part in [*zip(self.parts, spec.parts), *((o, p) for o, p in self._inner())]:
            self._flatten(operands, part)
        for (mask, _), layer in zip(self.layers, spec.layers):
            mask.main[0] = self._flat(mask.main[0], (_count(layer.mask),))
        #: By layer: which of its rows a row of the sequence takes, -1 for none; and for products where each goes.
        self.takes: list[Any] = []
        self.goes: list[Any] = []

    # Arguments ---------------------------------------------------------------------------------------------------

    def _argument(self, shape: Several[Size], dtype: str, name: str = "a") -> Any:
        self._arguments += 1
        return argument(f"{name}{self._arguments}", shape, dtype)

    def _lookup(self, lookup: Lookup) -> list[Any]:
        table = self._argument((lookup.table, self.spec.width), self.spec.dtype, "table")
        return [table, self._argument(lookup.ids, lookup.dtype, "ids")]

    def _part(self, part: Part) -> _Operands:
        source, out = part.source, _Operands()
        if isinstance(source, Copy):
            out.main = [self._argument(source.shape, self.spec.dtype, "x")]
        elif isinstance(source, Lookup):
            out.main = self._lookup(source)
        else:
            out.func = fused_linear(source.spec, self.machine)
            kinds = [(p.name, p.ty) for p in out.func.params[:-1]]
            out.main = [self._argument(list(ty.shape), str(ty.dtype), f"{name}_") for name, ty in kinds]
        out.addends = [self._addend(addend) for addend in part.addends]
        return out

    def _addend(self, addend: Addend) -> _Operands:
        if addend.lookup is not None:
            return _Operands(self._lookup(addend.lookup))
        return _Operands([self._argument(addend.shape, self.spec.dtype, "added")])

    def _layer(self, layer: Layer) -> tuple[_Operands, list[_Operands]]:
        mask = _Operands([self._argument(layer.mask, layer.dtype, "mask")])
        return mask, [self._part(part) for part in layer.parts]

    def _inner(self) -> list[tuple[_Operands, Part]]:
        pairs = zip(self.layers, self.spec.layers)
        return [(o, p) for (_, operands), layer in pairs for o, p in zip(operands, layer.parts)]

    @staticmethod
    def _flat(buffer: Any, shape: tuple[Size, ...]) -> Any:
        return T.decl_buffer(shape, str(buffer.ty.dtype), data=buffer.data, layout=None)

    def _flatten(self, operands: _Operands, part: Part) -> None:
        """Let rows be counted through whatever axes a value has."""
        source = part.source
        if isinstance(source, Copy):
            operands.main[0] = self._flat(operands.main[0], (_count(part.rows), self.spec.width))
        elif isinstance(source, Lookup):
            operands.main[1] = self._flat(operands.main[1], (_count(source.ids),))

    # Values ------------------------------------------------------------------------------------------------------

    def _widened(self, value: Expr) -> Expr:
        return cast(value, self.sums)

    def _rounded(self, value: Expr) -> Expr:
        return cast(value, self.spec.dtype)

    @staticmethod
    def _place(lookup: Lookup, given: Expr, keep: Keep) -> tuple[Expr, Expr | None]:
        """Return the row of the table that an integer means, never one outside; and whether it was inside."""
        size, zero = tirx.const(lookup.table, "int64"), tirx.const(0, "int64")
        at = given.astype("int64")
        if lookup.from_end:
            at = tirx.Select(at < zero, at + size, at)
        if lookup.mode == "wrap":
            return keep(tirx.truncmod(tirx.truncmod(at, size) + size, size)), None
        at = keep(at)
        inside = keep(tirx.all(at >= zero, at < size)) if lookup.mode == "nan" else None
        return keep(tirx.max(tirx.min(at, size - tirx.const(1, "int64")), zero)), inside

    def _looked_up(self, lookup: Lookup, table: Any, given: Expr, keep: Keep = T.bind) -> Callable[[Expr], Expr]:
        """Return the value of each lane of a table's row, as it is stored unless it is scaled."""
        row, inside = self._place(lookup, given, keep)

        def value(lane: Expr) -> Expr:
            out = table[row, lane]
            if lookup.scale != 1.0:
                out = self._widened(out) * tirx.const(lookup.scale, self.sums)
            if inside is None:
                return out
            return tirx.Select(inside, out, tirx.const(math.nan, str(out.ty.dtype).split("x")[0]))

        return value

    def _added(
        self, addend: Addend, operands: _Operands, at: Several[Expr], keep: Keep = T.bind
    ) -> Callable[[Expr], Expr]:
        """Return what is added at each lane of a row, given the row's indices."""
        zero = tirx.const(0, "int32")
        extents = addend.shape[:-1]
        index = [zero if _is_one(e) else i for e, i in zip(extents, at[len(at) - len(extents) :])]
        if addend.lookup is not None:
            return self._looked_up(addend.lookup, operands.main[0], operands.main[1][tuple(index)], keep)
        last = addend.shape[-1:]
        return lambda lane: _load(operands.main[0], [*index, *(zero if _is_one(e) else lane for e in last)])

    def _value(self, part: Part, operands: _Operands, row: Expr, at: Several[Expr]) -> Callable[[Expr], Expr]:
        """Return each lane of one row of a part that is no product."""
        source = part.source
        if isinstance(source, Lookup):
            core = self._looked_up(source, operands.main[0], operands.main[1][row])
        else:
            core = lambda lane: operands.main[0][row, lane]
        added = [self._added(a, o, at) for a, o in zip(part.addends, operands.addends)]

        def value(lane: Expr) -> Expr:
            out = core(lane)
            for term in added:
                out = self._widened(out) + self._widened(term(lane))
            return out

        return value

    # Rows --------------------------------------------------------------------------------------------------------

    def _loop(self, rows: Size, factor: int = MOVED) -> AbstractContextManager[Expr]:
        count = rows if isinstance(rows, int) else ASSUMED_EXTENT
        heavy = count * -(-self.spec.width // self.lanes) * factor >= PARALLEL_MIN_WORK
        return T.parallel(rows) if heavy else T.serial(rows)

    def _store(self, value: Callable[[Expr], Expr], at: Several[Expr]) -> None:
        whole = [self._added(a, o, at) for a, o in zip(self.spec.addends, self.addends)]

        def emit(lane: Expr) -> None:
            out = value(lane)
            for term in whole:
                out = self._widened(out) + self._widened(term(lane))
            T.buffer_store(self.result, self._rounded(out), [*at, lane])

        along(self.spec.width, self.lanes, emit, _REGISTERS)

    def _shifted(self, at: Several[Expr], offset: Size) -> list[Expr]:
        """Return the indices in the sequence of a row of a part."""
        axis, there = self.spec.axis, list(at)
        if not (isinstance(offset, int) and offset == 0):
            there[axis] = there[axis] + offset
        return there

    def _free(self, row: Expr) -> Expr | None:
        """Return whether no layer takes a row of the sequence."""
        free: Expr | None = None
        for takes in self.takes:
            here = takes[row] < tirx.const(0, "int32")
            free = here if free is None else tirx.all(free, here)
        return free

    def _flat_row(self, at: Several[Expr]) -> Expr:
        row: Expr | None = None
        for extent, index in zip(self.spec.rows, at):
            row = index if row is None else row * extent + index
        return tirx.const(0, "int32") if row is None else row

    def maps(self) -> None:
        """Walk over every mask: which row takes which."""
        spec, rows = self.spec, _count(self.spec.rows)
        nothing = tirx.const(-1, "int32")
        for (mask, operands), layer in zip(self.layers, spec.layers):
            takes = T.alloc_buffer((rows,), "int32", layout=None)
            lengths = [_count(part.rows) for part in layer.parts]
            length = _total(lengths)
            goes = None
            if any(o.func is not None for o in operands):
                goes = T.alloc_buffer((_at_least_one(length),), "int32", layout=None)
                with T.serial(length) as k:
                    T.buffer_store(goes, nothing, [k])
            seen = T.alloc_buffer((1,), "int32", scope="local", layout=None)
            T.buffer_store(seen, tirx.const(0, "int32"), [0])
            with T.serial(rows) as row:
                given = mask.main[0][row]
                true = given if layer.token is None else given == tirx.const(layer.token, layer.dtype)
                T.buffer_store(takes, nothing, [row])
                with T.If(true), T.Then():
                    number = seen[0] if layer.in_order else row.astype("int32")
                    free = self._free(row)
                    if free is not None:
                        with T.If(free), T.Then():
                            T.buffer_store(takes, number, [row])
                    else:
                        T.buffer_store(takes, number, [row])
                    if goes is not None:
                        with T.If(number < length), T.Then():
                            T.buffer_store(goes, row.astype("int32"), [number])
                    T.buffer_store(seen, seen[0] + tirx.const(1, "int32"), [0])
            self.takes.append(takes)
            self.goes.append(goes)

    def base(self) -> None:
        """Write the parts that follow each other, where no layer is."""
        offset: Size = 0
        for part, operands in zip(self.spec.parts, self.parts):
            here = offset
            if isinstance(part.source, Product):
                self._product(part, operands, self._behind(here))
            else:
                rows = _count(part.rows)
                with self._loop(rows) as row:
                    at = unravel(row, part.rows)
                    there = self._shifted(at, here)
                    free = self._free(self._flat_row(there)) if self.takes else None
                    if free is None:
                        self._store(self._value(part, operands, row, at), there)
                    else:
                        with T.If(free), T.Then():
                            self._store(self._value(part, operands, row, at), there)
            length: Size = part.rows[self.spec.axis]
            offset = length if isinstance(offset, int) and offset == 0 else offset + length

    def over(self) -> None:
        """Write what layers put over the sequence."""
        spec, rows = self.spec, _count(self.spec.rows)
        for number, ((_, operands), layer) in enumerate(zip(self.layers, spec.layers)):
            lengths = [_count(part.rows) for part in layer.parts]
            start: Size = 0
            for part, own, length in zip(layer.parts, operands, lengths):
                if own.func is not None:
                    self._product(part, own, self._gone(number, start))
                start = _total([start, length])
            with self._loop(rows) as row:
                there, total = unravel(row, spec.rows), _total(lengths)
                with T.If(self.takes[number][row] >= tirx.const(0, "int32")), T.Then():
                    taken = T.bind(_wide(self.takes[number][row]))
                    if isinstance(total, int) and total == 0:
                        self._nothing(there)
                    elif isinstance(total, int):
                        self._taken(number, taken, total, there)
                    else:
                        with T.If(_wide(total) > tirx.const(0, "int64")):
                            with T.Then():
                                self._taken(number, taken, total, there)
                            with T.Else():
                                self._nothing(there)

    def _nothing(self, there: Several[Expr]) -> None:
        nan = tirx.const(math.nan, self.spec.dtype)
        self._store(lambda lane: nan, there)

    def _behind(self, offset: Size) -> Place:
        """Return where rows of a product go that stands behind other parts."""
        return lambda at, row: (self._shifted(at, offset), None)

    def _gone(self, number: int, start: Size) -> Place:
        """Return where rows of a layer's product go, and whether they go anywhere."""

        def place(at: Several[Expr], row: Expr) -> tuple[list[Expr], Expr | None]:
            to = self.goes[number][row if isinstance(start, int) and start == 0 else row + start]
            return unravel(to, self.spec.rows), to >= tirx.const(0, "int32")

        return place

    def _taken(self, number: int, taken: Expr, total: Size, there: Several[Expr]) -> None:
        """Write the row of a layer's parts that a row of the sequence takes."""
        layer = self.spec.layers[number]
        last = _wide(total) - tirx.const(1, "int64")
        at = T.bind(tirx.min(taken, last))
        if not layer.elements:
            self._chosen(number, 0, 0, at, taken > last, there, False)
            return
        with T.If(taken > last):
            with T.Then():
                self._chosen(number, 0, 0, at, None, there, True)
            with T.Else():
                self._chosen(number, 0, 0, at, tirx.const(False, "bool"), there, False)

    def _chosen(
        self, number: int, which: int, start: Size, at: Expr, beyond: Expr | None, there: Several[Expr], single: bool
    ) -> None:
        """Write a row of the part that holds it: ``beyond`` is whether it is repeated (None: it is), ``single`` whether
        its last element stands for all."""
        layer, operands = self.spec.layers[number], self.layers[number][1]
        part, own = layer.parts[which], operands[which]
        end = _total([start, _count(part.rows)])
        if which + 1 == len(layer.parts):
            self._take(number, part, own, at - _wide(start), beyond, there, single)
            return
        with T.If(at < _wide(end)):
            with T.Then():
                self._take(number, part, own, at - _wide(start), beyond, there, single)
            with T.Else():
                self._chosen(number, which + 1, end, at, beyond, there, single)

    def _take(
        self,
        number: int,
        part: Part,
        operands: _Operands,
        row: Expr,
        beyond: Expr | None,
        there: Several[Expr],
        single: bool,
    ) -> None:
        final = tirx.const(self.spec.width - 1, "int32")

        def lane_of(lane: Expr) -> Expr:
            return final if single else lane

        if operands.func is None:
            row = T.bind(row)
            value = self._value(part, operands, row, unravel(row, part.rows))
            self._store(lambda lane: value(lane_of(lane)), there)
            return

        # The linear layer has put its rows where they belong; what is beyond them repeats the last one.
        def repeat() -> None:
            source = unravel(T.bind(self.goes[number][self._last(number)]), self.spec.rows)
            copied = along_row(lambda lane: _load(self.result, [*source, lane_of(lane)]), there)
            along(self.spec.width, self.lanes, copied)

        def along_row(value: Callable[[Expr], Expr], to: Several[Expr]) -> Callable[[Expr], None]:
            return lambda lane: T.buffer_store(self.result, value(lane), [*to, lane])

        if beyond is None:
            repeat()
        else:
            with T.If(beyond), T.Then():
                repeat()

    def _last(self, number: int) -> Expr:
        return _wide(_total([_count(part.rows) for part in self.spec.layers[number].parts])) - tirx.const(1, "int64")

    # Linear layers -----------------------------------------------------------------------------------------------

    def _product(self, part: Part, operands: _Operands, place: Place) -> None:
        """Leave a stand-in, and say what becomes of a store to the linear layer's own result."""

        def store(was: tirx.BufferStore) -> tirx.Stmt:
            *at, lane = list(was.indices)
            row: Expr | None = None
            for extent, index in zip(part.rows, at):
                row = index if row is None else row * extent + index
            there, found = place(at, tirx.const(0, "int32") if row is None else row)
            if found is None and self.takes:
                found = self._free(self._flat_row(there))
            value = was.value
            terms = [self._added(a, o, at, _as_it_is) for a, o in zip(part.addends, operands.addends)]
            terms += [self._added(a, o, there, _as_it_is) for a, o in zip(self.spec.addends, self.addends)]
            if terms and isinstance(value, tirx.Cast):
                # Rounded once, behind the last sum.
                value = value.value
            for term in terms:
                value = self._widened(value) + self._widened(term(lane))
            stored = tirx.BufferStore(self.result, self._rounded(value), [*there, lane])
            return stored if found is None else tirx.IfThenElse(found, stored, None)

        operands.number = _HERE - len(self.products)
        self.products.append((operands, store))
        T.evaluate(tirx.const(operands.number, "int32"))

    def bodies(self) -> dict[int, tirx.Stmt]:
        """Return the linear layers' bodies by their stand-ins."""
        out = {}
        for operands, store in self.products:
            assert operands.func is not None
            *params, result = operands.func.params
            renamed = dict(zip(params, operands.main))

            def redirect(was: tirx.BufferStore, store: Any = store, result: Any = result) -> tirx.Stmt:
                return store(was) if was.buffer.same_as(result) else was

            def rename(var: Any, renamed: Any = renamed) -> Any:
                return renamed.get(var, var)

            body = tvm_ffi.structural_map(operands.func.body, (tirx.BufferStore, redirect))
            out[operands.number] = tvm_ffi.structural_map(body, (ir.Var, rename))
        return out


def _load(buffer: Any, index: Several[Expr]) -> Expr:
    return buffer[tuple(index)]


def _as_it_is(value: Expr) -> Expr:
    return value


def _is_one(extent: Size) -> bool:
    return isinstance(extent, (int, tirx.IntImm)) and int(extent) == 1


def _total(extents: Several[Size]) -> Size:
    total: Size = 0
    for extent in extents:
        total = extent if isinstance(total, int) and total == 0 else total + extent
    return total


def _at_least_one(extent: Size) -> Size:
    return max(extent, 1) if isinstance(extent, int) else tirx.max(extent, tirx.const(1, "int64"))


def kernel(spec: Sequence, machine: Machine) -> tirx.PrimFunc:
    """Write the kernel.

    Parameters
    ----------
    spec : Sequence
    machine : Machine

    Returns
    -------
    tvm.tirx.PrimFunc
        Takes and returns through its arguments, see :class:`Sequence`; marked as scheduled, so that no rule touches it.
    """
    with writing("fused_sequence") as builder:
        writer = _Writer(spec, machine)
        writer.maps()
        writer.base()
        writer.over()
        bodies = writer.bodies()
    func = builder.get()

    def put(statement: tirx.Evaluate) -> tirx.Stmt:
        value = statement.value
        return bodies.get(int(value), statement) if isinstance(value, tirx.IntImm) else statement

    return vectorizable_math(func.with_body(tvm_ffi.structural_map(func.body, (tirx.Evaluate, put))))
