"""Write an attention kernel as TIR.

Keys are taken in blocks: the scores of a block, its greatest one, and weights against the greatest so far; when a
block has a greater one, what was summed before is scaled down.  So scores live in the first-level cache only.

Where the number of queries is symbolic, a kernel has both shapes of work and takes one when it runs.

Sources: M. Milakov and N. Gimelshein, Online normalizer calculation for softmax (arXiv 1805.02867, 2018); T. Dao and
others, FlashAttention (arXiv 2205.14135, 2022).
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..elementary import vectorizable_math
from ..machine import Machine
from ..writing import writing
from .plan import few_queries, plan
from .rows import RowWriter
from .spec import Spec
from .tiles import TileWriter
from .writer import Arguments

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
        arguments = Arguments(spec)
        few = few_queries(spec, machine)
        # A module's sizes may leave nothing to do, and nothing to divide by.
        if any(isinstance(n, int) and n == 0 for n in (spec.batch, spec.heads, spec.queries)):
            pass
        elif few is None:
            _WRITERS[cut.mode](spec, cut, arguments).write()
        else:
            with T.If(spec.queries <= few.most):
                with T.Then():
                    RowWriter(spec, few.cut, arguments).write()
                with T.Else():
                    TileWriter(spec, cut, arguments).write()
    return vectorizable_math(builder.get())
