"""One kernel for a chain of elementwise operators: load, compute in registers, store; no buffer between.

``y = relu(x * a + b)`` is one loop over vectors.  Operands are broadcast as numpy does; where none of them has axes of
its own, all axes are one loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from .activations import BINARY, UNARY
from .elementary import vectorizable_math
from .loops import unravel
from .machine import Machine
from .steps import ASSUMED_EXTENT, CHUNK_REGISTERS, COSTLY, MOVED, PARALLEL_MIN_WORK
from .writing import argument, cast, sum_dtype, writing

Expr: TypeAlias = ir.Expr
Extent: TypeAlias = int | Expr


def _is_one(extent: Extent) -> bool:
    return isinstance(extent, int) and extent == 1


def _loops(rows: Extent, columns: Extent, step: int, parallel: bool, emit: Callable[[Expr, Expr], None]) -> None:
    """Emit ``emit(row, column)`` for all of both, columns in vectors of ``step`` and a remainder."""

    def over(extent: Extent, spread: bool) -> Any:
        return T.parallel(extent) if spread else T.serial(extent)

    def line(row: Expr, spread: bool) -> None:
        chunks = columns // step if isinstance(columns, int) else tirx.floordiv(columns, step)
        rest = columns % step if isinstance(columns, int) else tirx.floormod(columns, step)
        if not (isinstance(chunks, int) and chunks == 0):
            with over(chunks, spread) as chunk, T.vectorized(step) as lane:
                emit(row, chunk * step + lane)
        # A line of nothing is a loop of no turns: TVM has no empty body.
        if not (isinstance(rest, int) and rest == 0) or (isinstance(chunks, int) and chunks == 0):
            with T.serial(rest) as last:
                emit(row, chunks * step + last)

    if _is_one(rows):
        line(tirx.const(0, "int32"), parallel)
        return
    with over(rows, parallel) as row:
        line(row, False)


def chain_kernel(
    operators: Sequence[str],
    shape: Sequence[Extent],
    operands: Sequence[Sequence[Extent]],
    dtype: str,
    machine: Machine,
) -> tirx.PrimFunc:
    """Write the kernel of a chain.

    Parameters
    ----------
    operators : sequence of str
        Names in ``activations.UNARY`` and ``activations.BINARY``; each takes what the one before gave.
    shape : sequence of int or tvm.tirx.Var
        Of x and of the result.
    operands : sequence of shapes
        Of the second operands of the binary operators, in their order; broadcast to ``shape``.
    dtype : str
        Of all of them; float16 is computed in float32 and rounded once.
    machine : Machine

    Returns
    -------
    tvm.tirx.PrimFunc
        Arguments: x, the operands, the result; marked as scheduled.

    Raises
    ------
    ValueError
        For an unknown operator, or another number of operands than the operators take.
    """
    wanted = sum(name in BINARY for name in operators)
    unknown = [name for name in operators if name not in BINARY and name not in UNARY]
    if unknown or len(operands) != wanted:
        raise ValueError(f"operators {list(operators)} take {wanted} operands, not {len(operands)}; unknown: {unknown}")
    inner = sum_dtype(dtype)
    whole = [not s or all(_is_one(e) for e in s) or _same(s, shape) for s in operands]
    flat = all(whole)
    axes: list[Extent] = [math.prod(shape)] if flat else list(shape)
    step = CHUNK_REGISTERS * machine.lanes(inner)
    if isinstance(axes[-1], int):
        while step > machine.lanes(inner) and step > axes[-1]:
            step //= 2
    size = math.prod(e if isinstance(e, int) else ASSUMED_EXTENT for e in shape)
    each = MOVED + sum(COSTLY if name in UNARY else 1 for name in operators)
    with writing("chain") as builder:
        names = ["x", *(f"operand{i}" for i in range(wanted)), "y"]
        shapes = [shape, *operands, shape]
        given = [argument(n, s, dtype) for n, s in zip(names, shapes)]
        if flat:
            given = [
                T.decl_buffer(tuple(axes) if _same(s, shape) else (1,), dtype, data=b.data, layout=None)
                for b, s in zip(given, shapes)
            ]
        _write(operators, given, axes, step, size * each // machine.lanes(inner) >= PARALLEL_MIN_WORK, inner)
    return vectorizable_math(builder.get())


def _same(shape: Sequence[Extent], other: Sequence[Extent]) -> bool:
    return len(shape) == len(other) and all(
        a == b if isinstance(a, int) and isinstance(b, int) else a is b or _same_expr(a, b)
        for a, b in zip(shape, other)
    )


def _same_expr(a: Extent, b: Extent) -> bool:
    return not isinstance(a, int) and not isinstance(b, int) and bool(a.same_as(b))


def _write(
    operators: Sequence[str], given: Sequence[Any], axes: Sequence[Extent], step: int, parallel: bool, inner: str
) -> None:
    x, *operands, y = given

    def emit(row: Expr, column: Expr) -> None:
        at = [*unravel(row, axes[:-1]), column]

        def load(buffer: Any) -> Expr:
            shape = list(buffer.shape)
            places = at[len(at) - len(shape) :]
            one = [isinstance(e, (int, tirx.IntImm)) and int(e) == 1 for e in shape]
            index = [tirx.const(0, "int32") if single else place for single, place in zip(one, places)]
            return cast(buffer[tuple(index)], inner)

        rest = iter(operands)
        value = load(x)
        for name in operators:
            value = BINARY[name](value, load(next(rest))) if name in BINARY else UNARY[name](value)
        T.buffer_store(y, cast(value, str(y.dtype)), at)

    rows = math.prod(axes[:-1]) if len(axes) > 1 else 1
    _loops(rows, axes[-1] if axes else 1, step, parallel, emit)
