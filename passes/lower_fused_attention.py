"""Replace fused attention regions by kernels.

    y = fused_attention(q, k, v, mask)      # Composite = "crossloom.fused_attention"
->  y = R.call_tir(fused_attention_kernel, (q, k, v, mask), ...)

Fires for every region that :mod:`crossloom.passes.regions.attention` can read: one attention and the views around it.
A mask that is proved to be causal, with a window or without, or to hide nothing, is not read; what makes it is dead
then.
Never for a region that holds anything else: it stays executable as it is, and the verdict says what it was.

Numerics: reassociates (online softmax; float32 scores and sums for float16).  Linear in the module's size.
Source: see :mod:`crossloom.schedules.attention.kernel`.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax, tirx

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Site
from crossloom.schedules.attention import kernel
from crossloom.schedules.machine import Machine

from .regions.attention import ATTENTION_REGION, Attention, read_attention
from .regions.lowering import Outer, lowering_pass

_NAME = "lower-fused-attention"


def _lower(site: Site, found: Attention, outer: Outer, machine: Machine) -> tuple[tirx.PrimFunc, Sequence[relax.Expr]]:
    return kernel(found.spec, machine), [outer(e) for e in found.operands]


def LowerFusedAttention(target: tvm.target.Target | None = None) -> tvm.transform.Pass:
    """Return the pass.

    Parameters
    ----------
    target : tvm.target.Target or None
        Registers and vectors are its; None takes the current target.

    Raises
    ------
    UnsupportedTarget
        When the pass runs and there is neither.
    """
    return lowering_pass(_NAME, ATTENTION_REGION, read_attention, _lower, target)


PASS = PassInfo(_NAME, LowerFusedAttention, "lower", REASSOCIATES, doc="Fused attention regions become kernels.")
