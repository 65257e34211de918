"""Write an attention kernel as TIR.

Keys are taken in blocks: the scores of a block, its greatest one, and weights against the greatest so far; when a
block has a greater one, what was summed before is scaled down.  So scores live in the first-level cache only.

Sources: M. Milakov and N. Gimelshein, Online normalizer calculation for softmax (arXiv 1805.02867, 2018); T. Dao and
others, FlashAttention (arXiv 2205.14135, 2022).
"""

from __future__ import annotations

from tvm import tirx

from ..elementary import vectorizable_math
from ..machine import Machine
from ..writing import writing
from .plan import plan
from .rows import RowWriter
from .spec import Spec
from .tiles import TileWriter

_WRITERS = {"tiles": TileWriter, "rows": RowWriter}


def kernel(spec: Spec, machine: Machine) -> tirx.PrimFunc:
    """Write the kernel.

    Parameters
    ----------
    spec : Spec
    machine : Machine

    Returns
    -------
    tvm.tirx.PrimFunc
        Takes and returns through its arguments, see :class:`Spec`; marked as scheduled, so that no rule touches it.
    """
    cut = plan(spec, machine)
    with writing("fused_attention") as builder:
        writer = _WRITERS[cut.mode](spec, cut)
        # A module's sizes may leave nothing to do, and nothing to divide by.
        if not any(isinstance(n, int) and n == 0 for n in (spec.batch, spec.heads, spec.queries)):
            writer.write()
    return vectorizable_math(builder.get())
