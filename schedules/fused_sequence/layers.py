"""What stands wherever a mask is true: placeholder tokens that the rows of another modality take the place of.

One walk over a mask says which row of the sequence takes which of the layer's, and for a linear layer the other way
round where each of its rows goes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Several

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..loops import along, unravel
from .operands import Operands, at_least_one, number_of, sum_of, wide
from .products import Place, Products
from .spec import Part, Size
from .values import Expr, load


class Layers(Products):
    """Writes what layers put over the sequence."""

    def maps(self) -> None:
        """Walk over every mask: which row takes which."""
        spec, rows = self.spec, number_of(self.spec.rows)
        nothing = tirx.const(-1, "int32")
        for (mask, operands), layer in zip(self.layers, spec.layers):
            takes = T.alloc_buffer((rows,), "int32", layout=None)
            lengths = [number_of(part.rows) for part in layer.parts]
            length = sum_of(lengths)
            goes = None
            if any(o.func is not None for o in operands):
                goes = T.alloc_buffer((at_least_one(length),), "int32", layout=None)
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

    def over(self) -> None:
        """Write what layers put over the sequence."""
        spec, rows = self.spec, number_of(self.spec.rows)
        for number, ((_, operands), layer) in enumerate(zip(self.layers, spec.layers)):
            lengths = [number_of(part.rows) for part in layer.parts]
            start: Size = 0
            for part, own, length in zip(layer.parts, operands, lengths):
                if own.func is not None:
                    self._product(part, own, self._gone(number, start))
                start = sum_of([start, length])
            with self._loop(rows) as row:
                there, total = unravel(row, spec.rows), sum_of(lengths)
                with T.If(self.takes[number][row] >= tirx.const(0, "int32")), T.Then():
                    taken = T.bind(wide(self.takes[number][row]))
                    if isinstance(total, int) and total == 0:
                        self._nothing(there)
                    elif isinstance(total, int):
                        self._taken(number, taken, total, there)
                    else:
                        with T.If(wide(total) > tirx.const(0, "int64")):
                            with T.Then():
                                self._taken(number, taken, total, there)
                            with T.Else():
                                self._nothing(there)

    def _nothing(self, there: Several[Expr]) -> None:
        nan = tirx.const(math.nan, self.spec.dtype)
        self._store(lambda lane: nan, there)

    def _gone(self, number: int, start: Size) -> Place:
        """Return where rows of a layer's product go, and whether they go anywhere."""

        def place(at: Several[Expr], row: Expr) -> tuple[list[Expr], Expr | None]:
            to = self.goes[number][row if isinstance(start, int) and start == 0 else row + start]
            return unravel(to, self.spec.rows), to >= tirx.const(0, "int32")

        return place

    def _taken(self, number: int, taken: Expr, total: Size, there: Several[Expr]) -> None:
        """Write the row of a layer's parts that a row of the sequence takes."""
        layer = self.spec.layers[number]
        last = wide(total) - tirx.const(1, "int64")
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
        end = sum_of([start, number_of(part.rows)])
        if which + 1 == len(layer.parts):
            self._take(number, part, own, at - wide(start), beyond, there, single)
            return
        with T.If(at < wide(end)):
            with T.Then():
                self._take(number, part, own, at - wide(start), beyond, there, single)
            with T.Else():
                self._chosen(number, which + 1, end, at, beyond, there, single)

    def _take(
        self,
        number: int,
        part: Part,
        operands: Operands,
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
            copied = along_row(lambda lane: load(self.result, [*source, lane_of(lane)]), there)
            along(self.spec.width, self.lanes, copied)

        def along_row(value: Callable[[Expr], Expr], to: Several[Expr]) -> Callable[[Expr], None]:
            return lambda lane: T.buffer_store(self.result, value(lane), [*to, lane])

        if beyond is None:
            repeat()
        else:
            with T.If(beyond), T.Then():
                repeat()

    def _last(self, number: int) -> Expr:
        return wide(sum_of([number_of(part.rows) for part in self.spec.layers[number].parts])) - tirx.const(1, "int64")
