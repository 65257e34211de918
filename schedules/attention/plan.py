"""How an attention kernel is cut: which shape of work, and its tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..machine import Machine
from ..steps import ASSUMED_EXTENT, PARALLEL_MIN_WORK
from .spec import Extent, Spec

#: Registers that a tile leaves for operands, beside its vectors of rows.
_SPARE_REGISTERS = 2
_MOST_KEYS = 12
#: Most keys that are weighed at once: their scores and a few elements of their values stay in the first-level cache.
_BLOCK = 128
#: Vector operations that a score costs which is summed over the lanes of a register, beside its products.
_SUMMED = 4
_MOST_ROWS = 12
#: So many vectors read from memory once more count as a vector operation.
_READS = 4


@dataclass(frozen=True)
class Plan:
    """A cut.

    Attributes
    ----------
    mode : str
        ``tiles``: the lanes of a register are rows (a query of one head each), for many; ``rows``: they are elements
        of a head, or keys where these are neighbours in memory, for few.
    lanes : int
        Of a register.
    width : int
        Rows of a tile; in mode ``rows`` those that are done together.
    height : int
        Keys whose scores are summed at once; registers of them where lanes are keys.
    depth : int
        Elements of a value that are summed at once; in mode ``rows`` a multiple of ``lanes``.
    block : int
        Keys that are weighed at once, a multiple of ``height``.
    parallel : bool
    """

    mode: Literal["tiles", "rows"]
    lanes: int
    width: int
    height: int
    depth: int
    block: int
    parallel: bool


def number(extents: Sequence[Extent]) -> int:
    """Return a product of extents for estimates; a symbolic one counts as ASSUMED_EXTENT."""
    total = 1
    for extent in extents:
        total *= extent if isinstance(extent, int) else ASSUMED_EXTENT
    return total


def plan(spec: Spec, machine: Machine) -> Plan:
    """Choose the cut for a machine; for a symbolic number of queries that for many."""
    lanes = machine.lanes(spec.sum_dtype)
    rows = spec.queries * spec.groups if isinstance(spec.queries, int) else None
    if rows is not None and _few(rows, spec, lanes):
        return _one_by_one(spec, machine, max(1, rows), spec.queries)
    registers = 4 if machine.vector_bytes == 16 and machine.registers >= 32 else 2
    if rows is not None:
        registers = max(1, min(registers, -(-rows // lanes)))
    height = min(_MOST_KEYS, (machine.registers - registers - _SPARE_REGISTERS) // registers)
    # Elements that are left over are summed in a loop of their own, where few sums wait for each other.
    depth = next((n for n in range(height, height // 2, -1) if spec.value_lanes % n == 0), height)
    width = registers * lanes
    parallel = _is_parallel(spec, lanes, spec.queries, width // spec.groups)
    return Plan("tiles", lanes, width, height, depth, _block(spec, height, width), parallel)


@dataclass(frozen=True)
class FewQueries:
    """What a kernel for a symbolic number of queries does where these are few.

    Attributes
    ----------
    most : int
        So many queries are few.
    cut : Plan
        For the rows of one of them.
    """

    most: int
    cut: Plan


def few_queries(spec: Spec, machine: Machine) -> FewQueries | None:
    """Return the cut for few queries one after another, where their number is symbolic; None where it is not.

    One query decides between shapes of work by what its own rows cost; more of them, by what a tile costs that holds
    them all, whose registers are busy with rows that are not there.
    """
    lanes = machine.lanes(spec.sum_dtype)
    if isinstance(spec.queries, int) or not _few(spec.groups, spec, lanes):
        return None
    many = plan(spec, machine)
    registers = many.width // lanes
    together = (spec.lanes + spec.value_lanes) * registers
    read = (spec.lanes + spec.value_lanes) // lanes // _READS
    most = min(together // (_apart(spec.groups, spec, lanes) + read), many.width // spec.groups)
    return FewQueries(max(1, most), _one_by_one(spec, machine, spec.groups, 1))


def _one_by_one(spec: Spec, machine: Machine, rows: int, queries: Extent) -> Plan:
    """Return a cut of which the lanes are elements of a head."""
    lanes = machine.lanes(spec.sum_dtype)
    height = min(lanes, 8 if rows == 1 else 4)
    depth = lanes * max(1, min(-(-spec.value_lanes // lanes), 4, (machine.registers - 4) // min(rows, 3)))
    parallel = _is_parallel(spec, lanes, queries, 1)
    return Plan("rows", lanes, rows, height, depth, _block(spec, lanes, 1), parallel)


def _is_parallel(spec: Spec, lanes: int, queries: Extent, together: int) -> bool:
    """Return whether the work is worth waking threads; ``together`` queries visit the same keys."""
    keys = sum(number([part]) for part in spec.keys)
    if spec.window is not None:
        keys = min(keys, spec.window + together)
    work = number([spec.batch, spec.heads, queries, spec.groups]) * keys * (spec.lanes + spec.value_lanes)
    # Under twice what other kernels need it gains little, and a thread that is busy elsewhere is waited for.
    return work // lanes >= 2 * PARALLEL_MIN_WORK


def _block(spec: Spec, height: int, rows: int) -> int:
    """Return how many keys are weighed at once, so that the last block is about as long as the others."""
    longest = max((n for n in spec.keys if isinstance(n, int)), default=_BLOCK)
    if not all(isinstance(n, int) for n in spec.keys):
        longest = max(longest, _BLOCK)
    if spec.window is not None:
        longest = min(longest, spec.window + -(-rows // spec.groups) - 1)
    even = -(-longest // max(1, -(-longest // _BLOCK)))
    return max(1, -(-even // height)) * height


def _few(rows: int, spec: Spec, lanes: int) -> bool:
    """Return whether rows one by one cost less than a register's worth of rows at once, of which most are idle."""
    if rows > _MOST_ROWS or spec.lanes < lanes or spec.value_lanes < lanes:
        return rows <= 1
    return _apart(rows, spec, lanes) <= (spec.lanes + spec.value_lanes) * -(-rows // lanes)


def _apart(rows: int, spec: Spec, lanes: int) -> int:
    """Return vector operations that a key costs rows one by one."""
    return rows * (-(-spec.lanes // lanes) + -(-spec.value_lanes // lanes) + _SUMMED)
