"""Replace residual sums with norms by kernels.

    s, n = fused_residual_norm(x, r, g)           # Composite = "crossloom.fused_residual_norm"
->  s, n = R.call_tir(fused_residual_norm_kernel, (x, r, g), ...)

Fires for every region that :mod:`crossloom.passes.regions.residual_norm` can read: one sum of two values, RMS and
layer norms of it over its last axis.
Never for a region that holds anything else: it stays executable as it is, and the verdict says what it was.

Numerics: reassociates (statistics in another order, in float32 for float16).  Linear in the module's size.
"""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Site
from crossloom.schedules.machine import Machine
from crossloom.schedules.residual_norm import kernel

from .regions.lowering import Outer, lowering_pass
from .regions.residual_norm import RESIDUAL_NORM_REGION, ResidualNormRegion, read_residual_norm

_NAME = "lower-fused-residual-norm"


def _lower(
    site: Site, region: ResidualNormRegion, outer: Outer, machine: Machine
) -> tuple[tirx.PrimFunc, list[relax.Expr]]:
    def flat(weight: relax.Expr) -> relax.Expr:
        return weight if weight.ty.ndim == 1 else site.builder.emit(relax.op.reshape(weight, [region.spec.depth]))

    weights = [flat(outer(weight)) for weight in region.weights]
    return kernel(region.spec, machine), [*(outer(term) for term in region.terms), *weights]


def LowerFusedResidualNorm(target: tvm.target.Target | None = None) -> tvm.transform.Pass:
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
    return lowering_pass(_NAME, RESIDUAL_NORM_REGION, read_residual_norm, _lower, target)


PASS = PassInfo(_NAME, LowerFusedResidualNorm, "lower", REASSOCIATES, doc="Residual sums with norms become kernels.")
