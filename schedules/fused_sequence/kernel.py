"""Write a sequence kernel as TIR.

Rows that exist, and rows of tables, are copied in vectors (:mod:`.values`).  A linear layer is the fused linear
kernel's own body (:mod:`.products`).  Where rows stand wherever a mask is true, the mask is walked over first
(:mod:`.layers`).
"""

from __future__ import annotations

import tvm_ffi
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..elementary import vectorizable_math
from ..loops import unravel
from ..machine import Machine
from ..writing import writing
from .layers import Layers
from .operands import number_of
from .products import Place
from .spec import Product, Sequence, Size


class _Writer(Layers):
    """Emits the kernel."""

    def base(self) -> None:
        """Write the parts that follow each other, where no layer is."""
        offset: Size = 0
        for part, operands in zip(self.spec.parts, self.parts):
            here = offset
            if isinstance(part.source, Product):
                self._product(part, operands, self._behind(here))
            else:
                rows = number_of(part.rows)
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

    def _behind(self, offset: Size) -> Place:
        """Return where rows of a product go that stands behind other parts."""
        return lambda at, row: (self._shifted(at, offset), None)


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
