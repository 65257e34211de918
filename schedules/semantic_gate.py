"""One kernel for what is gated by how alike two vectors are.

Every row of the operands is read once for the sums of products of two of them (a norm is one of a vector with itself),
in float32 for float16; numbers of these sums follow, exactly as they are written down (where a vector is zero they are
what that makes of 0); and a second time, from the first-level cache, for the sums of operands times such numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from .activations import BINARY, UNARY
from .elementary import vectorizable_math
from .loops import along, unravel
from .machine import Machine
from .steps import ASSUMED_EXTENT, MOVED, PARALLEL_MIN_WORK
from .writing import argument, cast, sum_dtype, writing

Expr: TypeAlias = ir.Expr
Size: TypeAlias = int | tirx.Expr


@dataclass(frozen=True)
class Number:
    """A number that is known."""

    value: float


@dataclass(frozen=True)
class Given:
    """A number that is an operand of one element; its place among those."""

    place: int


@dataclass(frozen=True)
class Dot:
    """The sum of products of two operands' rows; their places."""

    left: Any
    right: Any


@dataclass(frozen=True)
class Apply:
    """A function of numbers, by the name of its operator without ``relax.``."""

    name: str
    args: tuple[Scalar, ...]


Scalar: TypeAlias = Number | Given | Dot | Apply


@dataclass(frozen=True)
class Operand:
    """Vectors.

    Attributes
    ----------
    shape : tuple of int or tvm.tirx.Expr
        The last axis is the vector.
    follows : tuple of int or None
        For every other axis: which of the gate's row axes it follows, None where it is stretched.
    """

    shape: tuple[Size, ...]
    follows: tuple[int | None, ...]


@dataclass(frozen=True)
class Result:
    """A result: a sum of operands (their places) times numbers, or one number a row.

    Attributes
    ----------
    terms : tuple of (int, Scalar)
        None for a number.
    number : Scalar or None
    units : int
        Axes of size 1 behind the rows, for a number.
    """

    terms: tuple[tuple[int, Scalar], ...] = ()
    number: Scalar | None = None
    units: int = 0


@dataclass(frozen=True)
class Gate:
    """A kernel.

    Attributes
    ----------
    rows : tuple of int or tvm.tirx.Expr
    width : int
        Elements of a vector.
    dtype : str
        Of operands and results.
    operands : tuple of Operand
    given : tuple of int
        Ranks of the operands of one element.
    results : tuple of Result

    Notes
    -----
    The kernel's arguments: operands, operands of one element, results.
    """

    rows: tuple[Size, ...]
    width: int
    dtype: str
    operands: tuple[Operand, ...]
    given: tuple[int, ...]
    results: tuple[Result, ...]

    @property
    def sum_dtype(self) -> str:
        """The type sums are kept in."""
        return sum_dtype(self.dtype)


_BINARY = {**BINARY, "power": tirx.power}
_UNARY = {name: UNARY[name] for name in ("sqrt", "rsqrt", "sigmoid", "exp", "tanh", "abs", "negative")}
#: Functions of numbers that a kernel knows.
FUNCTIONS = frozenset((*_BINARY, *_UNARY))


def dots_of(scalar: Scalar) -> list[Dot]:
    """Return the sums of products that a number is made of."""
    if isinstance(scalar, Dot):
        return [scalar]
    return [d for arg in scalar.args for d in dots_of(arg)] if isinstance(scalar, Apply) else []


class _Writer:
    def __init__(self, spec: Gate, machine: Machine) -> None:
        self.spec, self.sums = spec, spec.sum_dtype
        self.lanes = machine.lanes(self.sums)
        dtype = spec.dtype
        self.operands = [argument(f"x{i}", operand.shape, dtype) for i, operand in enumerate(spec.operands)]
        self.given = [argument(f"number{i}", (1,) * rank, dtype) for i, rank in enumerate(spec.given)]
        self.results = [argument(f"result{i}", self._shape(result), dtype) for i, result in enumerate(spec.results)]
        self.known: dict[Scalar, Expr] = {}

    def _shape(self, result: Result) -> tuple[Size, ...]:
        return (*self.spec.rows, self.spec.width) if result.number is None else (*self.spec.rows, *(1,) * result.units)

    def _load(self, place: int, at: Sequence[Expr], lane: Expr) -> Expr:
        zero = tirx.const(0, "int32")
        index = [zero if axis is None else at[axis] for axis in self.spec.operands[place].follows]
        index.append(lane)
        return cast(self.operands[place][tuple(index)], self.sums)

    def sums_of(self, dots: Sequence[Dot], at: Sequence[Expr]) -> None:
        """Find sums of products of a row, all in one walk over it."""
        if not dots:
            return
        width, wide = self.spec.width, self.lanes
        wide = 2 * wide if width >= 2 * wide and len(dots) <= 4 else wide
        zero, whole = tirx.const(0.0, self.sums), width // wide
        parts = [T.alloc_buffer((wide,), self.sums, scope="local", layout=None) for _ in dots]
        for part in parts:
            with T.vectorized(wide) as lane:
                T.buffer_store(part, zero, [lane])
        if whole:
            with T.serial(whole) as chunk:
                for part, dot in zip(parts, dots):
                    with T.vectorized(wide) as lane:
                        here = chunk * wide + lane
                        product = self._load(dot.left, at, here) * self._load(dot.right, at, here)
                        T.buffer_store(part, part[lane] + product, [lane])
        if width % wide:
            with T.serial(width % wide) as lane:
                for part, dot in zip(parts, dots):
                    here = whole * wide + lane
                    product = self._load(dot.left, at, here) * self._load(dot.right, at, here)
                    T.buffer_store(part, part[lane] + product, [lane])
        while wide > 1:
            wide //= 2
            for part in parts:
                with T.vectorized(wide) if wide > 1 else T.serial(1) as lane:
                    T.buffer_store(part, part[lane] + part[lane + wide], [lane])
        for part, dot in zip(parts, dots):
            self.known[dot] = T.bind(part[0])

    def number(self, scalar: Scalar) -> Expr:
        """Return a number of the row, found once."""
        if isinstance(scalar, Number):
            return tirx.const(scalar.value, self.sums)
        if scalar not in self.known and isinstance(scalar, Given):
            buffer = self.given[scalar.place]
            self.known[scalar] = T.bind(cast(buffer[(0,) * self.spec.given[scalar.place]], self.sums))
        if scalar not in self.known:
            assert isinstance(scalar, Apply)
            args = [self.number(arg) for arg in scalar.args]
            made = _UNARY[scalar.name](args[0]) if scalar.name in _UNARY else _BINARY[scalar.name](args[0], args[1])
            self.known[scalar] = T.bind(made)
        return self.known[scalar]

    def row(self, at: Sequence[Expr]) -> None:
        """Write the results of a row."""
        spec = self.spec
        for result, buffer in zip(spec.results, self.results):
            if result.number is not None:
                index = [*at, *(tirx.const(0, "int32") for _ in range(result.units))]
                T.buffer_store(buffer, cast(self.number(result.number), spec.dtype), index)
                continue
            factors = [(place, self.number(factor), factor) for place, factor in result.terms]

            def emit(lane: Expr, factors: Any = factors, buffer: Any = buffer) -> None:
                total: Expr | None = None
                for place, factor, known in factors:
                    value = self._load(place, at, lane)
                    value = value if known == Number(1.0) else factor * value
                    total = value if total is None else total + value
                T.buffer_store(buffer, cast(total, spec.dtype), [*at, lane])

            along(spec.width, self.lanes, emit)


def kernel(spec: Gate, machine: Machine) -> tirx.PrimFunc:
    """Write the kernel.

    Parameters
    ----------
    spec : Gate
    machine : Machine

    Returns
    -------
    tvm.tirx.PrimFunc
        Takes and returns through its arguments, see :class:`Gate`; marked as scheduled, so that no rule touches it.
    """
    numbers = [n for r in spec.results for n in ([f for _, f in r.terms] if r.number is None else [r.number])]
    dots = list(dict.fromkeys(d for n in numbers for d in dots_of(n)))
    fixed = [d for d in dots if all(f is None for i in (d.left, d.right) for f in spec.operands[i].follows)]
    with writing("fused_gate") as builder:
        writer = _Writer(spec, machine)
        rows: Size = math.prod(spec.rows) if spec.rows else 1
        count = rows if isinstance(rows, int) else ASSUMED_EXTENT
        work = count * -(-spec.width // writer.lanes) * (len(dots) + MOVED * len(spec.results))
        zero = [tirx.const(0, "int32")] * len(spec.rows)
        writer.sums_of(fixed, zero)
        with T.parallel(rows) if work >= PARALLEL_MIN_WORK else T.serial(rows) as row:
            at = unravel(row, spec.rows)
            writer.sums_of([d for d in dots if d not in fixed], at)
            writer.row(at)
    return vectorizable_math(builder.get())
