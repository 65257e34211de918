"""Replace fused linear regions by kernels.

    q, k, v = fused_linear(x, w, wq, wk, wv)      # Composite = "crossloom.fused_linear"
->  p = R.permute_dims(R.reshape(R.concat((wq, wk, wv)), ...), ...)   # on weights alone: folded when a model is built
    q, k, v = R.call_tir(fused_linear_kernel, (x, w, p), ...)

Fires for every region that :mod:`crossloom.passes.regions.linear` can read: one norm at most, linear layers of one
value, then bias, activation or gate, scale, rotation, residual, in this order, and views between them.
Never for a region that holds anything else, nor for a chain that the target's capability table does not let one kernel
do: it stays executable as it is, and the verdict says what it was.

Numerics: reassociates (sums of products in another order, float32 sums for float16).  Linear in the module's size.
"""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Site
from crossloom.schedules.fused_linear import kernel, plan
from crossloom.schedules.machine import Machine
from crossloom.schedules.templates import allowed, chain_of
from crossloom.verdict import Verdict, accept

from .regions.linear import LINEAR_REGION, Region, read_linear
from .regions.lowering import Outer, lowering_pass
from .regions.operands import linear_operands, norm_folded

_NAME = "lower-fused-linear"


def _legal(region: Region, target: tvm.target.Target) -> Verdict:
    """Ask the target's table for every result."""
    verdicts = (allowed(chain_of(region.spec, output), target) for output in region.spec.outputs)
    return next((verdict for verdict in verdicts if not verdict.fired), accept())


def _lower(site: Site, region: Region, outer: Outer, machine: Machine) -> tuple[tirx.PrimFunc, list[relax.Expr]]:
    layers = norm_folded(site, region, outer)
    operands = linear_operands(site.builder, region, outer, layers, plan(layers.spec, machine))
    return kernel(layers.spec, machine), operands


def LowerFusedLinear(target: tvm.target.Target | None = None) -> tvm.transform.Pass:
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
    return lowering_pass(_NAME, LINEAR_REGION, read_linear, _lower, target, _legal)


PASS = PassInfo(_NAME, LowerFusedLinear, "lower", REASSOCIATES, doc="Fused linear regions become kernels.")
