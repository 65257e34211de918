"""What stands in a row of a sequence: rows that exist, rows of tables, and what is added to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Several
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from ..loops import along
from ..machine import Machine
from ..steps import ASSUMED_EXTENT, MOVED, PARALLEL_MIN_WORK
from ..writing import cast
from .operands import Arguments, Operands, is_one
from .spec import Addend, Lookup, Part, Sequence, Size

Expr: TypeAlias = ir.Expr
#: Gives a value a name, where statements are being written.
Keep: TypeAlias = Callable[[Expr], Expr]

#: Registers that one turn of a copying loop fills.
_REGISTERS = 4


class Values(Arguments):
    """Reads values by lane, and stores rows of them."""

    def __init__(self, spec: Sequence, machine: Machine) -> None:
        super().__init__(spec, machine)
        self.sums, self.lanes = spec.sum_dtype, machine.lanes(spec.dtype)
        #: By layer: which of its rows a row of the sequence takes, -1 for none; and for products where each goes.
        self.takes: list[Any] = []
        self.goes: list[Any] = []

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
        self, addend: Addend, operands: Operands, at: Several[Expr], keep: Keep = T.bind
    ) -> Callable[[Expr], Expr]:
        """Return what is added at each lane of a row, given the row's indices."""
        zero = tirx.const(0, "int32")
        extents = addend.shape[:-1]
        index = [zero if is_one(e) else i for e, i in zip(extents, at[len(at) - len(extents) :])]
        if addend.lookup is not None:
            return self._looked_up(addend.lookup, operands.main[0], operands.main[1][tuple(index)], keep)
        last = addend.shape[-1:]
        return lambda lane: load(operands.main[0], [*index, *(zero if is_one(e) else lane for e in last)])

    def _value(self, part: Part, operands: Operands, row: Expr, at: Several[Expr]) -> Callable[[Expr], Expr]:
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


def load(buffer: Any, index: Several[Expr]) -> Expr:
    return buffer[tuple(index)]
