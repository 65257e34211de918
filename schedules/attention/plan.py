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


@dataclass(frozen=True)
class Plan:
    """A cut.

    Attributes
    ----------
    mode : str
        ``tiles``: the lanes of a register are rows (a query of one head each), for many; ``rows``: they are elements
        of a head, for few.
    lanes : int
        Of a register.
    width : int
        Rows of a tile; in mode ``rows`` all of them.
    height : int
        Keys whose scores are summed at once.
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
    """Choose the cut for a machine."""
    lanes = machine.lanes(spec.sum_dtype)
    rows = spec.queries * spec.groups if isinstance(spec.queries, int) else None
    keys = sum(number([part]) for part in spec.keys)
    work = number([spec.batch, spec.heads, spec.queries, spec.groups]) * keys * (spec.lanes + spec.value_lanes)
    # Under twice what other kernels need it gains little, and a thread that is busy elsewhere is waited for.
    parallel = work // lanes >= 2 * PARALLEL_MIN_WORK
    if rows is not None and _few(rows, spec, lanes):
        height = min(lanes, 8 if rows == 1 else 4)
        depth = lanes * max(1, min(-(-spec.value_lanes // lanes), 4, (machine.registers - 4) // max(1, min(rows, 3))))
        return Plan("rows", lanes, max(1, rows), height, depth, _block(spec, lanes), parallel)
    registers = 4 if machine.vector_bytes == 16 and machine.registers >= 32 else 2
    if rows is not None:
        registers = max(1, min(registers, -(-rows // lanes)))
    height = min(_MOST_KEYS, (machine.registers - registers - _SPARE_REGISTERS) // registers)
    # Elements that are left over are summed in a loop of their own, where few sums wait for each other.
    depth = next((n for n in range(height, height // 2, -1) if spec.value_lanes % n == 0), height)
    return Plan("tiles", lanes, registers * lanes, height, depth, _block(spec, height), parallel)


def _block(spec: Spec, height: int) -> int:
    """Return how many keys are weighed at once, so that the last block is about as long as the others."""
    longest = max((n for n in spec.keys if isinstance(n, int)), default=_BLOCK)
    if not all(isinstance(n, int) for n in spec.keys):
        longest = max(longest, _BLOCK)
    even = -(-longest // max(1, -(-longest // _BLOCK)))
    return max(1, -(-even // height)) * height


def _few(rows: int, spec: Spec, lanes: int) -> bool:
    """Return whether rows one by one cost less than a register's worth of rows at once, of which most are idle."""
    if rows > _MOST_ROWS or spec.lanes < lanes or spec.value_lanes < lanes:
        return rows <= 1
    together = (spec.lanes + spec.value_lanes) * -(-rows // lanes)
    return rows * (-(-spec.lanes // lanes) + -(-spec.value_lanes // lanes) + _SUMMED) <= together
