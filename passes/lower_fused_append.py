"""Replace regions of joins by kernels.

    k, v = fused_append(past_k, new_k, past_v, new_v)      # Composite = "crossloom.fused_append"
->  k, v = R.call_tir(fused_append_kernel, (past_k, new_k, past_v, new_v), ...)

Fires for every region that :mod:`crossloom.passes.regions.append` can read: joins along an axis.
Never for a region that holds anything else: it stays executable as it is, and the verdict says what it was.

Numerics: exact.  Linear in the module's size.
"""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from crossloom.numerics import EXACT
from crossloom.registry import PassInfo
from crossloom.rewrite import Site
from crossloom.schedules.join import kernel
from crossloom.schedules.machine import Machine

from .regions.append import APPEND_REGION, AppendRegion, read_append
from .regions.lowering import Outer, lowering_pass

_NAME = "lower-fused-append"


def _lower(site: Site, region: AppendRegion, outer: Outer, machine: Machine) -> tuple[tirx.PrimFunc, list[relax.Expr]]:
    return kernel(region.joins, machine), [outer(part) for part in region.parts]


def LowerFusedAppend(target: tvm.target.Target | None = None) -> tvm.transform.Pass:
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
    return lowering_pass(_NAME, APPEND_REGION, read_append, _lower, target)


PASS = PassInfo(_NAME, LowerFusedAppend, "lower", EXACT, doc="Joins of caches become kernels.")
