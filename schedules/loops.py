"""Loops of kernels written with TVM's IR builder: vectors along a row, sums of a row, indices of fused axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

from .steps import CHUNK_REGISTERS


def along(extent: int, lanes: int, emit: Callable[[ir.Expr], None], registers: int = 2) -> None:
    """Emit ``emit(k)`` for all k below ``extent``: several registers at a time, then one, then single values.

    Parameters
    ----------
    extent : int
    lanes : int
        Elements of one register.
    emit : callable
        Emits the statements of an index, which may be a vector of neighbouring ones.
    registers : int
        Registers that one turn of the loop fills.
    """
    wide = registers * lanes
    done = extent // wide * wide
    if done:
        with T.serial(done // wide) as chunk, T.vectorized(wide) as lane:
            emit(chunk * wide + lane)
    while extent - done >= lanes:
        with T.vectorized(lanes) as lane:
            emit(done + lane)
        done += lanes
    if done < extent:
        with T.serial(extent - done) as rest:
            emit(done + rest)


def sum_along(
    extent: int,
    lanes: int,
    dtype: str,
    term: Callable[[ir.Expr], ir.Expr],
    before: Callable[[ir.Expr], None] = lambda k: None,
) -> tirx.Var:
    """Emit the sum of ``term(k)`` over all k below ``extent`` and return it.

    Parameters
    ----------
    extent : int
    lanes : int
        Elements of one register.
    dtype : str
        Of the terms and the sum.
    term : callable
        The term of an index, which may be a vector of neighbouring ones.
    before : callable
        Emits what is done at an index before its term is taken.

    Notes
    -----
    Sums run side by side in several registers, which are then halved until one value is left: what is rounded grows
    with the logarithm of the lanes, and no addition waits for the one before.  The buffer is read and written whole or
    at fixed places, so that it stays in registers; it is of scope ``global``, since one of scope ``local`` is fetched
    from TVM's workspace, however small.
    """
    done = 0
    result = None
    if extent >= lanes:
        registers = next(n for n in (CHUNK_REGISTERS, 2, 1) if extent >= n * lanes)
        wide = registers * lanes
        sums = T.alloc_buffer((wide,), dtype, layout=None)

        def add(k: ir.Expr, lane: ir.Expr) -> None:
            before(k)
            T.buffer_store(sums, sums[lane] + term(k), [lane])

        with T.vectorized(wide) as lane:
            T.buffer_store(sums, tirx.const(0.0, dtype), [lane])
        with T.serial(extent // wide) as chunk, T.vectorized(wide) as lane:
            add(chunk * wide + lane, lane)
        done = extent // wide * wide
        while extent - done >= lanes:
            with T.vectorized(lanes) as lane:
                add(done + lane, lane)
            done += lanes
        result = _across(sums, wide, dtype)
    if result is None:
        result = T.alloc_buffer((1,), dtype, layout=None)
        T.buffer_store(result, tirx.const(0.0, dtype), [0])
    if done < extent:
        with T.serial(extent - done) as k:
            before(done + k)
            T.buffer_store(result, result[0] + term(done + k), [0])
    return T.bind(result[0])


def _across(sums: tirx.Buffer, wide: int, dtype: str) -> tirx.Buffer:
    """Add up a buffer's halves until one value is left, each time into a buffer of its own."""
    while wide > 1:
        value = tirx.BufferLoad(sums, [tirx.Ramp(0, 1, wide)])
        wide //= 2
        first, second = (tirx.Shuffle([value], [tirx.const(at + i, "int32") for i in range(wide)]) for at in (0, wide))
        sums = T.alloc_buffer((wide,), dtype, layout=None)
        T.buffer_store(sums, first + second, [tirx.Ramp(0, 1, wide) if wide > 1 else 0])
    return sums


def unravel(index: ir.Expr, extents: Sequence[int | ir.Expr]) -> list[ir.Expr]:
    """Return the indices of axes from that of all of them in one."""
    out: list[ir.Expr] = []
    for extent in reversed(extents[1:]):
        # Of at most one index, or none at all, there is nothing to divide by.
        single = isinstance(extent, int) and extent <= 1
        out.append(tirx.const(0, "int32") if single else tirx.floormod(index, extent))
        index = index if single else tirx.floordiv(index, extent)
    return [*([index] if extents else []), *reversed(out)]
