"""A residual sum and the norms of it, or norms of a value that is there, in one pass over memory.

``sum = left + right``, and for each norm ``(sum - mean) / sqrt(variance + epsilon) * weight + bias`` (layer) or
``sum / sqrt(mean of squares + epsilon) * weight`` (RMS).  A row of both operands is read once; its sum is written where
it is kept, or where a norm of it will stand, and read back from the first-level cache: once for a mean, once for the
squares about it, once for the results.  Without a sum the value itself is.  Sums of float16 are rounded once, as the
sum by itself would be; statistics are float32 then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from .fused_linear import Norm
from .loops import along, sum_along, unravel
from .machine import Machine
from .steps import MOVED, PARALLEL_MIN_WORK
from .writing import argument, cast, spread, sum_dtype, writing

Expr: TypeAlias = ir.Expr
#: Which axis of the sum each dimension of an operand follows, None where the operand is stretched along it.
Follows: TypeAlias = tuple[int | None, ...]


@dataclass(frozen=True)
class ResidualNorm:
    """What a kernel computes.

    Attributes
    ----------
    rows : tuple of int or tvm.tirx.Var
        Leading axes of what is normed.
    depth : int
        Its last axis, normed over; at least 1.
    dtype : str
        Of what is normed, and of what it is a sum of; statistics are float32 (float64 for float64).
    terms : tuple of Follows
        The dimensions of the sum's two operands; or of what is normed itself, which is stretched nowhere.
    norms : tuple of Norm
        Weights and biases are of type ``dtype``, unless the norm says otherwise.
    keeps_sum : bool
        Whether the sum is a result; never without one.
    types : tuple of str
        Of each norm's result; none where all are of type ``dtype``.

    Notes
    -----
    The kernel's arguments: the terms, weight and bias ``(depth,)`` of each norm in turn where it has them, then the
    results: the sum where it is kept, the norms.
    """

    rows: tuple[int | tirx.Var, ...]
    depth: int
    dtype: str
    terms: tuple[Follows, ...]
    norms: tuple[Norm, ...]
    keeps_sum: bool = False
    types: tuple[str, ...] = ()

    @property
    def sum_dtype(self) -> str:
        """The type statistics are kept in."""
        return sum_dtype(self.dtype)

    def shape(self, follows: Follows) -> list[int | tirx.Expr]:
        """Return the shape of an operand."""
        extents = (*self.rows, self.depth)
        return [1 if axis is None else extents[axis] for axis in follows]


class _Writer:
    """Emits one kernel; the arguments are declared in the order of :class:`ResidualNorm`."""

    def __init__(self, spec: ResidualNorm, lanes: int) -> None:
        self.spec, self.lanes = spec, lanes
        self.rows: int | Expr = math.prod(spec.rows) if spec.rows else 1
        whole = (*spec.rows, spec.depth)
        terms = [argument(f"term{i}", spec.shape(f), spec.dtype) for i, f in enumerate(spec.terms)]
        self.weights = [self._affine(i, norm) for i, norm in enumerate(spec.norms)]
        kept = [argument("sum", whole, spec.dtype)] if spec.keeps_sum else []
        types = spec.types or (spec.dtype,) * len(spec.norms)
        results = [argument(f"result{i}", whole, dtype) for i, dtype in enumerate(types)]
        # All arguments come before the first alias.
        self.results = [self._by_row(result) for result in results]
        if len(terms) == 1:
            self.sum = self._by_row(terms[0])
        else:
            # Of several norms the last one's place is written last.
            self.sum = self._by_row(kept[0]) if kept else self.results[-1]
            self.left, self.right = (self._operand(term, follows) for term, follows in zip(terms, spec.terms))

    def _affine(self, number: int, norm: Norm) -> tuple[Any, Any]:
        """Declare a norm's weight and bias, those that are there."""
        shape, dtype = (self.spec.depth,), norm.dtype or self.spec.dtype
        weight = argument(f"weight{number}", shape, dtype) if norm.weight else None
        return weight, argument(f"bias{number}", shape, dtype) if norm.bias else None

    def _by_row(self, buffer: Any) -> Any:
        return T.decl_buffer((self.rows, self.spec.depth), buffer.dtype, data=buffer.data, layout=None)

    def _operand(self, buffer: Any, follows: Follows) -> Callable[[Expr, Expr], Expr]:
        """Return what reads an operand at a row and a place in it."""
        if follows == tuple(range(len(self.spec.rows) + 1)):
            flat = self._by_row(buffer)
            return lambda row, k: self._load(flat, row, k)

        def stretched(row: Expr, k: Expr) -> Expr:
            indices = [*unravel(row, self.spec.rows), k]
            return self._load(buffer, *(tirx.const(0, "int32") if axis is None else indices[axis] for axis in follows))

        return stretched

    def _load(self, buffer: Any, *indices: Expr) -> Expr:
        return cast(buffer[tuple(indices)], self.spec.sum_dtype)

    def write(self) -> None:
        """Go over the rows, on all threads where that is worth waking them."""
        spec = self.spec
        row_work = (2 + len(spec.norms)) * MOVED * spec.depth // self.lanes + 1
        spread(self.rows, self.rows >= -(-PARALLEL_MIN_WORK // row_work), self._row)

    def _row(self, row: Expr) -> None:
        spec, sums = self.spec, self.spec.sum_dtype

        def add(k: Expr) -> None:
            if len(spec.terms) == 1:
                return
            # The norms are of the sum as it is rounded, wherever it is kept.
            rounded = cast(self.left(row, k) + self.right(row, k), spec.dtype)
            T.buffer_store(self.sum, cast(rounded, str(self.sum.dtype)), [row, k])

        def value(k: Expr) -> Expr:
            return self._load(self.sum, row, k)

        def mean_of(term: Callable[[Expr], Expr], before: Callable[[Expr], None] = lambda k: None) -> Expr:
            found = sum_along(spec.depth, self.lanes, sums, term, before)
            return T.bind(found * tirx.const(1.0 / spec.depth, sums))

        # By kind: what is subtracted, and the mean of squares of what is left.
        statistics: dict[str, tuple[Expr | None, Expr]] = {}
        if any(norm.kind == "layer" for norm in spec.norms):
            mean = mean_of(value, add)
            statistics["layer"] = mean, mean_of(lambda k: (value(k) - mean) * (value(k) - mean))
        if any(norm.kind == "rms" for norm in spec.norms):
            first = {} if statistics else {"before": add}
            statistics["rms"] = None, mean_of(lambda k: value(k) * value(k), **first)
        one = tirx.const(1.0, sums)
        factors = [
            T.bind(one / tirx.sqrt(statistics[norm.kind][1] + tirx.const(norm.epsilon, sums))) for norm in spec.norms
        ]

        def norms(k: Expr) -> None:
            for norm, factor, (weight, bias), result in zip(spec.norms, factors, self.weights, self.results):
                centre = statistics[norm.kind][0]
                out = (value(k) if centre is None else value(k) - centre) * factor
                out = out if weight is None else out * self._load(weight, k)
                out = out if bias is None else out + self._load(bias, k)
                T.buffer_store(result, cast(out, str(result.dtype)), [row, k])

        along(spec.depth, self.lanes, norms)


def kernel(spec: ResidualNorm, machine: Machine) -> tirx.PrimFunc:
    """Write the kernel.

    Parameters
    ----------
    spec : ResidualNorm
    machine : Machine

    Returns
    -------
    tvm.tirx.PrimFunc
        Takes and returns through its arguments; marked as scheduled, so that no rule touches it.
    """
    with writing("residual_norm") as builder:
        _Writer(spec, machine.lanes(spec.sum_dtype)).write()
    return builder.get()
