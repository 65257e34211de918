"""How slices, views and broadcasting move the lines of ``lines`` over other axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tvm import relax, tirx

from .lines import Line, Offset, Split, Value, proved


def number(expr: relax.Expr) -> Offset:
    """Return an operand of a shape or slice, plain where it is static."""
    return int(expr) if isinstance(expr, (int, tirx.IntImm)) else expr


def ints(fields: Sequence[relax.Expr]) -> list[int]:
    """Return static operands; TypeError for a symbolic one."""
    return [int(f) for f in fields]


def inserted(slopes: Sequence[int], places: Sequence[int]) -> list[int]:
    """Return slopes with axes of size 1 put in."""
    out = list(slopes)
    for place in places:
        out.insert(place, 0)
    return out


def move(value: Value, slopes: Callable[[Sequence[int]], Sequence[int]], rank: int) -> Value:
    """Return the value over other axes; axes that broadcasting would add are written out first."""

    def move(now: Sequence[int]) -> Sequence[int]:
        return slopes([0] * (rank - len(now)) + list(now))

    return value.move(move(value.slopes)) if isinstance(value, Line) else value.move(move)


def narrow(value: Value, shape: list[int | None] | None) -> Value:
    """Return the value with no slope along axes of size 1, where the index is 0."""
    if shape is None:
        return value
    return move(value, lambda s: [0 if d == 1 else k for k, d in zip(s, shape)], len(shape))


def sliced(value: Value, axes: list, begin: list, end: list, strides: list | None = None, *, rank: int) -> Value:
    """Return the value behind a slice, ValueError where an index counts from the end."""
    if isinstance(value, Split) and value.line is None:
        return value
    line = value if isinstance(value, Line) else value.line
    slopes, offset = list(line.slopes), line.offset  # type: ignore[union-attr]
    slopes = [0] * (rank - len(slopes)) + slopes
    for axis, first, step in zip(ints(axes), map(number, begin), ints(strides or [1] * len(axes))):
        # Counted from the end, the first index would depend on the size.
        if step < 1 or not proved(first >= 0):
            raise ValueError
        offset, slopes[axis % rank] = offset + slopes[axis % rank] * first, slopes[axis % rank] * step
    moved = Line(tuple(slopes), offset)
    return moved if isinstance(value, Line) else replace(value, line=moved)
