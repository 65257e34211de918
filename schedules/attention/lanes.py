"""Turning and summing vectors in registers: networks of shuffles, log2(lanes) steps deep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from tvm import ir, tirx
from tvm.script.ir_builder import tirx as T

Expr: TypeAlias = ir.Expr
#: Which elements of two vectors side by side make two new ones.
_Pattern: TypeAlias = tuple[list[int], list[int]]


def _patterns(lanes: int) -> Iterator[_Pattern]:
    """Yield for each step which elements of a pair (x, y) are read, as blocks of growing size.

    Of four blocks ``x0 x1 x2 x3`` the first of two steps reads ``x0 y0 x1 y1`` and ``x2 y2 x3 y3``, the second halves:
    x86 has instructions for these within each 16 bytes, unlike for ``x0 y0 x2 y2``.
    """
    size = 1
    while size < lanes:
        if lanes // size >= 4:
            yield _blocks(lanes, size, ((0, 0), (1, 0), (0, 1), (1, 1)), ((0, 2), (1, 2), (0, 3), (1, 3)))
            size *= 2
            yield _blocks(lanes, size, ((0, 0), (1, 0)), ((0, 1), (1, 1)))
        else:
            yield _blocks(lanes, size, ((0, 0), (1, 0)), ((0, 1), (1, 1)))
        size *= 2


def _blocks(lanes: int, size: int, low: Sequence[tuple[int, int]], high: Sequence[tuple[int, int]]) -> _Pattern:
    """Return indices into x and y side by side; (side, block) within each group of as many blocks as there are."""
    group = len(low) * size

    def indices(chosen: Sequence[tuple[int, int]]) -> list[int]:
        return [
            side * lanes + start + block * size + i
            for start in range(0, lanes, group)
            for side, block in chosen
            for i in range(size)
        ]

    return indices(low), indices(high)


def _shuffled(x: Expr, y: Expr, indices: Sequence[int]) -> Expr:
    return tirx.Shuffle([x, y], [tirx.const(i, "int32") for i in indices])


def summed(vectors: Sequence[Expr], lanes: int) -> Expr:
    """Return a vector of the sums of vectors.

    Parameters
    ----------
    vectors : sequence of Expr
        As many as a power of two, ``lanes`` at most, each of ``lanes`` elements.

    Returns
    -------
    Expr
        One element per vector.
    """
    count, steps = len(vectors), _patterns(lanes)
    while len(vectors) > 1:
        low, high = next(steps)
        pairs = zip(vectors[::2], vectors[1::2])
        vectors = [T.bind(_shuffled(x, y, low) + _shuffled(x, y, high)) for x, y in pairs]
    (total,) = vectors
    width = lanes
    while width > count:
        width //= 2
        halves = [tirx.Shuffle([total], [tirx.const(i + at, "int32") for i in range(width)]) for at in (0, width)]
        total = T.bind(halves[0] + halves[1])
    return total


def turned(vectors: Sequence[Expr], lanes: int) -> list[Expr]:
    """Return the columns of a square of which ``vectors`` are the rows."""
    groups = [[vector] for vector in vectors]
    columns = [list(range(lanes)) for _ in groups[0]]
    for low, high in _patterns(lanes):
        groups = [
            [T.bind(_shuffled(x, y, half)) for x, y in zip(first, second) for half in (low, high)]
            for first, second in zip(groups[::2], groups[1::2])
        ]
        # Every group holds the same columns in the same places.
        columns = [[(row + row)[i] for i in half] for row in columns for half in (low, high)]
    order = {row[0]: vector for row, vector in zip(columns, groups[0])}
    return [order[column] for column in range(lanes)]
