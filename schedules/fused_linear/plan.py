"""How a fused linear kernel is cut: columns into groups of whole registers, rows into tiles, both over threads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..machine import Machine
from ..steps import ASSUMED_EXTENT, PARALLEL_MIN_WORK
from .spec import Output, Spec

_MOST_ROWS = 8
#: Sums that have to be under way for the adders to be busy: two a cycle, each done after four.
_BUSY_SUMS = 8
#: Rows of x that are worked through before the next group of columns: this much of x comes from the last-level cache.
#: Measured: less than 512 KiB costs up to a tenth at a depth of 1536, more gains nothing.
_CACHED_BYTES = 1 << 20
#: Pieces of work that threads of whatever number share fairly.
_FAIR_PIECES = 16
#: Vector operations that take as long as loading a vector of weights that no cache of the core's own holds.
_LOADED = 3
#: Vector operations on each vector of x, where something is done to it in front of the sums.
_PREPARED = 8


@dataclass(frozen=True)
class Columns:
    """The groups of one output.

    Attributes
    ----------
    start : int
        Its first group.
    per_head : int
        Groups of each head.
    pairs : int
        How many of these, the first ones, hold pairs: two registers' worth of columns that are combined.
    unit : int
        Its first unit of work: a group, or a head where the lanes of heads are normed.
    """

    start: int
    per_head: int
    pairs: int
    unit: int


@dataclass(frozen=True)
class Plan:
    """A cut.

    Attributes
    ----------
    width : int
        Columns of a group.
    registers : int
        Vector registers that a row of a group fills.
    height : int
        Rows of a tile.
    rests : tuple of int
        Heights that the last tile may have instead; none where the tiles fit.
    groups : int
    abreast : int
        Groups whose sums are made at the same time where there is one row: what waits for memory is loading weights,
        and neighbouring groups lie in pages of their own.
    units : int
        What the groups make in units of work, see :class:`Columns`.
    columns : tuple of Columns
        One per output.
    chunk : int
        Rows that are worked through before the next unit of columns, a multiple of ``height``; the most of them where
        the number of rows is symbolic.
    pieces : int
        The least number of chunks, where there are as many tiles.
    parallel, parallel_rows : bool
        Whether threads share the sums of products, and what is done to rows in front of them.
    """

    width: int
    registers: int
    height: int
    rests: tuple[int, ...]
    groups: int
    abreast: int
    units: int
    columns: tuple[Columns, ...]
    chunk: int
    pieces: int
    parallel: bool
    parallel_rows: bool

    def partial(self, height: int) -> int:
        """Return into how many sums each one of a tile of this height is split; one alone would wait for itself."""
        return max(1, -(-_BUSY_SUMS // (height * self.registers)))


def rows_of(spec: Spec) -> int | None:
    """Return the number of rows, None where it is symbolic."""
    return math.prod(int(r) for r in spec.rows) if all(isinstance(r, int) for r in spec.rows) else None


def _tiles(rows: int | None, most: int) -> tuple[int, tuple[int, ...]]:
    """Return the height of tiles, as even as can be, and what the last one may have instead."""
    if rows is None:
        return most, tuple(range(most - 1, 0, -1))
    height = -(-rows // max(1, -(-rows // most))) or 1
    return height, (rows % height,) if rows % height else ()


def plan(spec: Spec, machine: Machine) -> Plan:
    """Choose the cut for a machine."""
    lanes = machine.lanes(spec.sum_dtype)
    widest = max(o.lanes for o in spec.outputs)
    registers = min(4 if machine.vector_bytes == 16 and machine.registers >= 32 else 2, -(-widest // lanes))
    paired = any(_pairs(o) for o in spec.outputs)
    registers = max(registers, 2 if paired else 1)
    width = registers * lanes
    columns, start, units = [], 0, 0
    for output in spec.outputs:
        pairs, heads = _pairs(output), math.prod(output.heads)
        in_pairs, whole = -(-pairs // (width // 2)) if pairs else 0, -(-_singles(output) // width)
        columns.append(Columns(start, in_pairs + whole, in_pairs, units))
        start += heads * (in_pairs + whole)
        units += heads * (in_pairs + whole if output.norm is None else 1)
    rows = rows_of(spec)
    # One register row of weights and one value of x beside the sums.
    height, rests = _tiles(rows, max(1, min(_MOST_ROWS, (machine.registers - registers - 1) // registers)))
    assumed = ASSUMED_EXTENT if rows is None else rows
    vectors = start * registers * spec.depth
    abreast = _BUSY_SUMS // registers if rows == 1 and all(o.norm is None for o in spec.outputs) else 1
    if start < 4 * abreast:
        abreast = 1
    units = -(-units // abreast)
    parallel = vectors * max(assumed, _LOADED) >= PARALLEL_MIN_WORK and assumed > 0
    most = max(1, _CACHED_BYTES // (4 * spec.depth) // height)
    pieces = -(-_FAIR_PIECES // units) if parallel else 1
    if rows is not None:
        tiles = -(-rows // height)
        chunks = max(-(-tiles // most), pieces)
        most = max(1, -(-tiles // chunks))
    prepared = assumed * spec.depth * _PREPARED // lanes if spec.prepares else 0
    return Plan(
        width,
        registers,
        height,
        rests,
        start,
        abreast,
        units,
        tuple(columns),
        most * height,
        pieces,
        parallel,
        prepared >= PARALLEL_MIN_WORK,
    )


def _pairs(output: Output) -> int:
    """Return how many pairs of columns a head has; lanes that are normed first stand alone until they are."""
    if output.gate is not None:
        return output.lanes
    return output.rotary.dim // 2 if output.rotary is not None and output.norm is None else 0


def _singles(output: Output) -> int:
    """Return how many columns of a head stand alone."""
    if output.gate is not None:
        return 0
    return output.lanes - 2 * _pairs(output)


def order(spec: Spec, cut: Plan) -> np.ndarray:
    """Return which column of W each column of each group is.

    Returns
    -------
    np.ndarray
        ``(groups * width,)`` int64.  Columns that fill up a group are any column: what they give is not stored.
    """
    out: list[np.ndarray] = []
    half = cut.width // 2
    for output in spec.outputs:
        offsets = np.zeros((), np.int64)
        for extent, stride in zip(output.heads, output.strides, strict=True):
            offsets = offsets[..., None] + stride * np.arange(extent)
        pairs = np.arange(_pairs(output))
        if output.gate is not None:
            first, second = output.gate + pairs, output.first + pairs
        elif output.rotary is not None and output.rotary.convention == "interleaved":
            first, second = output.first + 2 * pairs, output.first + 2 * pairs + 1
        else:
            first, second = output.first + pairs, output.first + pairs + len(pairs)
        head: list[np.ndarray] = []
        for at in range(0, len(pairs), half):
            head += [_filled(first[at : at + half], half), _filled(second[at : at + half], half)]
        singles = output.first + output.lanes - _singles(output) + np.arange(_singles(output))
        head += [_filled(singles[at : at + cut.width], cut.width) for at in range(0, len(singles), cut.width)]
        columns = np.concatenate(head)
        out += [columns + offset for offset in offsets.reshape(-1)]
    return np.concatenate(out).astype(np.int64)


def _filled(columns: np.ndarray, width: int) -> np.ndarray:
    """Return columns repeated up to a width."""
    return np.concatenate([columns, np.repeat(columns[-1:], width - len(columns))])
