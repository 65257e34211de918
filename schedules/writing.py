"""What every kernel written with TVM's IR builder begins with: its frame, its arguments, types, loops over rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tvm import ir
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T


@contextmanager
def writing(name: str) -> Iterator[IRBuilder]:
    """Open a kernel; when it is closed, the builder's ``get()`` returns it.

    Its arguments do not overlap, no schedule rule touches it, and TVM fuses nothing with it.
    """
    with IRBuilder() as builder:
        with T.prim_func(private=True):
            T.func_name(name)
            T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True, "op_pattern": 8})
            yield builder


def argument(name: str, shape: Sequence[int | ir.Expr], dtype: str) -> Any:
    """Declare a tensor among the kernel's arguments; all of them come before the first alias."""
    return T.arg(name, T.buffer(tuple(shape), dtype, layout=None))


def sum_dtype(dtype: str) -> str:
    """Return the type that sums of a float type are kept in."""
    return "float64" if dtype == "float64" else "float32"


def cast(value: ir.Expr, dtype: str) -> ir.Expr:
    """Return a value, or a vector, of another element type."""
    return value if str(value.ty.dtype).split("x")[0] == dtype else value.astype(dtype)


def spread(extent: int | ir.Expr, heavy: bool | ir.Expr, emit: Callable[[ir.Expr], None]) -> None:
    """Emit ``emit(i)`` for all i, on all threads where that is worth waking them.

    Parameters
    ----------
    extent : int or tvm.ir.Expr
    heavy : bool or tvm.ir.Expr
        Whether it is; an expression is asked when the kernel runs.
    emit : callable
    """
    if isinstance(heavy, bool):
        with T.parallel(extent) if heavy else T.serial(extent) as i:
            emit(i)
        return
    with T.If(heavy):
        with T.Then(), T.parallel(extent) as i:
            emit(i)
        with T.Else(), T.serial(extent) as i:
            emit(i)
