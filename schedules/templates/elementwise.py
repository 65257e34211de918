"""A chain of operators between one load and one store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tvm import tirx

from crossloom.targets import Fusion
from crossloom.verdict import Verdict, refuse

from ..activations import BINARY, UNARY
from ..chain import chain_kernel
from ..machine import Machine

Extent: TypeAlias = int | tirx.Var


@dataclass(frozen=True)
class ElementwiseTemplate:
    """A chain between one load and one store.

    Attributes
    ----------
    operators : tuple of str
        Without load and store.
    limit : Fusion
        The row that allows it.
    machine : Machine
    """

    operators: tuple[str, ...]
    limit: Fusion
    machine: Machine

    @property
    def operands(self) -> int:
        """How many operands it takes beside the value that runs through it."""
        return sum(name in BINARY for name in self.operators)

    def kernel(
        self, shape: Sequence[Extent], operands: Sequence[Sequence[Extent]] | None = None, dtype: str = "float32"
    ) -> tirx.PrimFunc:
        """Write the kernel; see :func:`crossloom.schedules.chain.chain_kernel`.

        Parameters
        ----------
        shape : sequence of int or tvm.tirx.Var
        operands : sequence of shapes or None
            None gives every operand the value's own shape.
        dtype : str
        """
        shapes = [shape] * self.operands if operands is None else operands
        return chain_kernel(self.operators, shape, shapes, dtype, self.machine)


def between(names: Sequence[str]) -> tuple[str, list[str]] | Verdict:
    """Return the operators between load and store."""
    inner = list(names)
    if inner[0] == "load":
        inner = inner[1:]
    if inner and inner[-1] == "store":
        inner = inner[:-1]
    for name in inner:
        if name in ("load", "store"):
            return refuse("order-of-steps", name, "a chain is one load and one store, at its ends")
        if name not in BINARY and name not in UNARY:
            return refuse("operator-not-in-table", name, "it is not elementwise")
    return "", inner
