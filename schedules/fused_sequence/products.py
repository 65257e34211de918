"""Linear layers in a sequence: the fused linear kernel's own body, its stores sent to the rows that are its."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import Any, TypeAlias

import tvm_ffi
from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from ..machine import Machine
from .operands import Operands
from .spec import Part, Sequence
from .values import Expr, Values

#: From a row of a part, its indices and its number, to its indices in the sequence, and whether it goes there.
Place: TypeAlias = Callable[[Several[Expr], Expr], tuple[list[Expr], Expr | None]]

#: Stands, with the number of a product, where its body goes.
_HERE = -1000


class Products(Values):
    """Leaves stand-ins for linear layers, whose bodies are put there when the rest is written."""

    def __init__(self, spec: Sequence, machine: Machine) -> None:
        super().__init__(spec, machine)
        self.products: list[tuple[Operands, Callable[[tirx.BufferStore], tirx.Stmt]]] = []

    def _product(self, part: Part, operands: Operands, place: Place) -> None:
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
            terms = [self._added(a, o, at, as_it_is) for a, o in zip(part.addends, operands.addends)]
            terms += [self._added(a, o, there, as_it_is) for a, o in zip(self.spec.addends, self.addends)]
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


def as_it_is(value: Expr) -> Expr:
    return value
