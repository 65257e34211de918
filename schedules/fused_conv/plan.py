"""How a fused convolution kernel is cut: channels and places into tiles of registers, places into stretches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import tvm

from ..machine import Machine
from ..steps import ASSUMED_EXTENT, PARALLEL_MIN_WORK
from .geometry import Geometry
from .spec import Extent, Spec

#: Sums that have to be under way for the adders to be busy: two a cycle, each done after four.
_BUSY_SUMS = 8
#: Vectors of x and single weights that are loaded in a cycle, and what else a turn of the innermost loop takes.
_LOADS, _TURN = 2.0, 0.5
#: Cycles in which a weight is there that no cache of the core's own holds.
_WEIGHT = 0.8
#: What a tile takes beside its products (cycles, about): starting and storing sums, finding addresses.
_TILE = 12.0
#: The most output channels of a tile.
_MOST_CHANNELS = 12
#: The copy of x that all output channels are made of before the next stretch of places: in the second-level cache.
_SLAB_BYTES = 192 << 10
#: Of x under one tile: stays in the first-level cache while the output channels go over it.
_TILE_BYTES = 20 << 10
#: Weights that stay in the second-level cache while tiles go over them.
_WEIGHT_BYTES = 256 << 10
#: Input channels that are worth putting sums down behind them.
_LEAST_DEPTH = 16
#: Pieces of work that threads of whatever number share fairly.
_FAIR_PIECES = 16
#: Fewer output channels than this are not worth a copy of x of their own.
_LEAST_OUTPUTS = 32
#: Bytes of a cache line, and of a stride at which lines of a first-level cache drive each other out.
_LINE, _CLASH = 64, 1024
#: Channels whose lines stay in a cache although they clash.
_FEW_CHANNELS = 4


@dataclass(frozen=True)
class Plan:
    """A cut.

    Attributes
    ----------
    block : int
        Output channels of a tile.
    blocks : int
        Such blocks in a group; the last may hold fewer channels.
    rows, vectors : int
        The most rows of a tile and vectors in each; all vectors of a row where there are several rows.
    depth : int
        Input channels that are summed up before the next tile: fewer than there are where sums are put down between.
    blocks_first : bool
        Whether each block of output channels goes over all tiles of a piece, instead of each tile over all blocks:
        where weights come from further away than x.
    stretch : int
        Rows, or places where there is one axis, that one piece of work goes over; the most of them where their number
        is symbolic.
    stretches : int or None
        None where the number is symbolic.
    share, shares : int
        Blocks that one piece of work makes, and the number of such shares.
    apiece : int
        Groups that one piece of work goes over.
    direct : bool
        Whether x is read where it lies.
    parallel : bool
        Whether threads share the pieces.
    """

    block: int
    blocks: int
    rows: int
    vectors: int
    depth: int
    blocks_first: bool
    stretch: int
    stretches: int | None
    share: int
    shares: int
    apiece: int
    direct: bool
    parallel: bool


def split(extent: int, most: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return how an extent is cut into tiles of at most so much: (size, number) of the larger ones, of the smaller."""
    tiles = -(-extent // most)
    each, larger = divmod(extent, tiles)
    return (each + 1, larger), (each, tiles - larger)


def copied(values: int, dtype: str) -> int:
    """Return the distance of channels in a copy: an odd number of cache lines, so that they share no place there."""
    line = _LINE * 8 // tvm.DataType(dtype).bits
    return (-(-values // line) | 1) * line


def _static(extent: Extent, otherwise: int = ASSUMED_EXTENT) -> int:
    return extent if isinstance(extent, int) else otherwise


def _turn(block: int, count: int) -> float:
    """Return the cycles of one turn of the innermost loop of a tile of ``block`` channels by ``count`` vectors."""
    return max(block * count / 2, (block + count) / _LOADS, _BUSY_SUMS / 2, block * _WEIGHT) + _TURN


def _tile(spec: Spec, machine: Machine, rows: int | None, columns: int | None) -> tuple[int, int, int]:
    """Return channels, rows and vectors of the tile that takes the least time for a whole group."""
    outputs = spec.outputs // spec.groups
    row = ASSUMED_EXTENT if columns is None else max(1, -(-columns // machine.lanes(spec.sum_dtype)))
    turns = math.prod(spec.kernel) * spec.channels // spec.groups
    best, least = (1, 1, 1), math.inf
    for block in range(1, min(outputs, _MOST_CHANNELS) + 1):
        for count in range(1, machine.registers):
            # One channel's product takes x from memory: vectors of x need no registers.
            if block * count + (count if block > 1 else 0) + 1 > machine.registers:
                break
            several = rows is not None and columns is not None and count > row
            tall, vectors = (count // row, row) if several else (1, count)
            if tall * vectors != count or vectors > row or tall > max(1, rows or 1):
                continue
            time = sum(
                m * n * (turns * _turn(block, high * wide) + _TILE)
                for high, m in split(max(1, _static(rows or ASSUMED_EXTENT)), tall)
                for wide, n in split(row, vectors)
            )
            time *= -(-outputs // block)
            if time < least:
                best, least = (block, tall, vectors), time
    return best


@lru_cache(maxsize=256)
def plan(spec: Spec, machine: Machine) -> Plan:
    """Choose the cut for a machine."""
    spec = spec.along_one_axis()
    lanes, geometry = machine.lanes(spec.sum_dtype), Geometry.of(spec)
    item = tvm.DataType(spec.sum_dtype).bits // 8
    inner, outputs, taps = spec.channels // spec.groups, spec.outputs // spec.groups, math.prod(spec.kernel)
    flat = len(spec.size) == 1
    width, height = spec.result[-1], 1 if flat else spec.result[-2]
    rows, columns = (e if isinstance(e, int) else None for e in (height, width))
    if not flat and not geometry.reach[-1]:
        # Rows that follow one another without a gap are one.
        block, tall, vectors = _tile(spec, machine, 1, None if rows is None or columns is None else rows * columns)
    else:
        block, tall, vectors = _tile(spec, machine, rows, columns)
    blocks = -(-outputs // block)
    # Pieces.
    long, unit = (width, vectors * lanes) if flat else (height, tall)
    before = max(1, _static(spec.batch, 1) * math.prod(_static(e) for e in spec.result[:-2]))
    places = before * _static(height) * _static(width)
    parallel = places * spec.outputs * inner * taps // lanes >= 2 * PARALLEL_MIN_WORK
    pieces = _FAIR_PIECES if parallel else 1
    phases = math.prod(geometry.phases)
    line = inner * phases * math.prod(r + 1 for r in geometry.reach[:-2]) * item
    line *= 1 if flat else _static(width) + geometry.reach[-1]
    stretch = _stretch(
        _static(long), unit, _SLAB_BYTES // line, -(-pieces // (before * spec.groups)), lanes if flat else tall
    )
    stretches = -(-long // stretch) if isinstance(long, int) else None
    have = before * (-(-_static(long) // stretch))
    apiece = max(
        d for d in range(1, spec.groups + 1) if d == 1 or (spec.groups % d == 0 and have * spec.groups >= d * pieces)
    )
    have *= spec.groups // apiece
    shares = max(1, min(-(-pieces // have), outputs // _LEAST_OUTPUTS)) if have < pieces else 1
    share = -(-blocks // shares)
    # Input channels.
    under = math.prod(spec.kernel[:-1]) * geometry.phases[-1] * tall * (vectors * lanes * item + _LINE)
    piece = line // inner * (stretch + geometry.reach[0 if flat else -2])
    depth = _TILE_BYTES // piece
    weights = block * inner * taps * item
    far = share * weights > _WEIGHT_BYTES
    first = far and inner * under > _TILE_BYTES and depth >= min(inner, _LEAST_DEPTH)
    if far and not first and parallel:
        # Fewer channels a piece, whose weights stay in the cache from one stretch to the next.
        share = max(-(-_LEAST_OUTPUTS // block), min(share, _WEIGHT_BYTES // weights))
        share = -(-blocks // -(-blocks // share))
    depth = max(1, min(inner, depth if first else _TILE_BYTES // under))
    depth = -(-inner // -(-inner // depth))
    direct = flat and spec.is_pointwise and spec.dtype == spec.sum_dtype and isinstance(width, int)
    direct = direct and stretch >= vectors * lanes and (inner <= _FEW_CHANNELS or width * item % _CLASH != 0)
    return Plan(
        block,
        blocks,
        tall,
        vectors,
        depth,
        first,
        stretch,
        stretches,
        share,
        -(-blocks // share),
        1 if direct else apiece,
        direct,
        parallel,
    )


def _stretch(extent: int, unit: int, most: int, pieces: int, whole: int) -> int:
    """Return how long stretches are: in the cache, and as many as are asked where they are long enough.

    ``unit`` is the extent of a tile, ``whole`` what its parts are multiples of.
    """
    # Half as much again is better than two stretches that are not full.
    stretches = max(1, round(extent / max(unit, most)), min(pieces, extent // (4 * unit)))
    return max(1, min(-(-extent // stretches // whole) * whole, extent))
