"""End what a failed import leaves open in a block builder."""

from __future__ import annotations

import contextlib

from tvm import relax


def close_blocks(bb: relax.BlockBuilder | None) -> None:
    """End every open block of a builder that is given up: TVM warns on stderr when it collects one with blocks."""
    with contextlib.suppress(Exception):  # how the builder says that no block is left
        while bb is not None:
            bb._end_block()
