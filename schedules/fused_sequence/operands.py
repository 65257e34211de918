"""The arguments of a sequence kernel, and sizes of which some are symbolic."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from ..fused_linear import own_kernel as fused_linear
from ..machine import Machine
from ..writing import argument
from .spec import Addend, Copy, Layer, Lookup, Part, Sequence, Size

Expr: TypeAlias = ir.Expr


@dataclass
class Operands:
    """The buffers of a part, an addend or a layer, in the order of their arguments; the first ones are what is read."""

    main: list[Any] = field(default_factory=list)
    addends: list[Operands] = field(default_factory=list)
    #: A product's function and its stand-in.
    func: tirx.PrimFunc | None = None
    number: int = 0


def number_of(extents: Several[Size]) -> Size:
    total: Size = 1
    for extent in extents:
        total = extent if isinstance(total, int) and total == 1 else total * extent
    return total


def sum_of(extents: Several[Size]) -> Size:
    total: Size = 0
    for extent in extents:
        total = extent if isinstance(total, int) and total == 0 else total + extent
    return total


def is_one(extent: Size) -> bool:
    return isinstance(extent, (int, tirx.IntImm)) and int(extent) == 1


def at_least_one(extent: Size) -> Size:
    return max(extent, 1) if isinstance(extent, int) else tirx.max(extent, tirx.const(1, "int64"))


def wide(value: Size) -> Expr:
    return tirx.const(value, "int64") if isinstance(value, int) else value.astype("int64")


class Arguments:
    """Declares everything that a kernel takes and gives."""

    def __init__(self, spec: Sequence, machine: Machine) -> None:
        self.spec, self.machine = spec, machine
        self._arguments = 0
        self.parts = [self._part(part) for part in spec.parts]
        self.layers = [self._layer(layer) for layer in spec.layers]
        self.addends = [self._addend(addend) for addend in spec.addends]
        self.result = argument("result", (*spec.rows, spec.width), spec.dtype)
        # All arguments come before the first alias.
        for operands, part in [*zip(self.parts, spec.parts), *((o, p) for o, p in self._inner())]:
            self._flatten(operands, part)
        for (mask, _), layer in zip(self.layers, spec.layers):
            mask.main[0] = self._flat(mask.main[0], (number_of(layer.mask),))

    def _argument(self, shape: Several[Size], dtype: str, name: str = "a") -> Any:
        self._arguments += 1
        return argument(f"{name}{self._arguments}", shape, dtype)

    def _lookup(self, lookup: Lookup) -> list[Any]:
        table = self._argument((lookup.table, self.spec.width), self.spec.dtype, "table")
        return [table, self._argument(lookup.ids, lookup.dtype, "ids")]

    def _part(self, part: Part) -> Operands:
        source, out = part.source, Operands()
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

    def _addend(self, addend: Addend) -> Operands:
        if addend.lookup is not None:
            return Operands(self._lookup(addend.lookup))
        return Operands([self._argument(addend.shape, self.spec.dtype, "added")])

    def _layer(self, layer: Layer) -> tuple[Operands, list[Operands]]:
        mask = Operands([self._argument(layer.mask, layer.dtype, "mask")])
        return mask, [self._part(part) for part in layer.parts]

    def _inner(self) -> list[tuple[Operands, Part]]:
        pairs = zip(self.layers, self.spec.layers)
        return [(o, p) for (_, operands), layer in pairs for o, p in zip(operands, layer.parts)]

    @staticmethod
    def _flat(buffer: Any, shape: tuple[Size, ...]) -> Any:
        return T.decl_buffer(shape, str(buffer.ty.dtype), data=buffer.data, layout=None)

    def _flatten(self, operands: Operands, part: Part) -> None:
        """Let rows be counted through whatever axes a value has."""
        source = part.source
        if isinstance(source, Copy):
            operands.main[0] = self._flat(operands.main[0], (number_of(part.rows), self.spec.width))
        elif isinstance(source, Lookup):
            operands.main[1] = self._flat(operands.main[1], (number_of(source.ids),))
