"""Replace feed-forward regions by kernels.

    y = fused_feed_forward(x, g, gate, up, down)  # Composite = "crossloom.fused_feed_forward"
->  p = R.permute_dims(R.reshape(R.concat((gate, up)), ...), ...)     # on weights alone: folded when a model is built
    q = R.permute_dims(R.reshape(down, ...), ...)
    y = R.call_tir(fused_feed_forward_kernel, (x, g, p, q, x), ...)

Fires for every region that :mod:`crossloom.passes.regions.feed_forward` can read: two linear regions, of which the
second takes the first one's only result.
Never for a region that holds anything else, nor where the target's capability table does not let one of the two chains
be one kernel: it stays executable as it is, and the verdict says what it was.

Numerics: reassociates (sums of products in another order, float32 sums for float16).  Linear in the module's size.
"""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Site
from crossloom.schedules.feed_forward import FeedForward, cut, kernel
from crossloom.schedules.machine import Machine
from crossloom.schedules.templates import allowed, chain_of
from crossloom.verdict import Verdict, accept

from .regions.feed_forward import FEED_FORWARD_REGION, FeedForwardRegion, read_feed_forward
from .regions.lowering import Outer, lowering_pass
from .regions.operands import linear_operands, norm_folded

_NAME = "lower-fused-feed-forward"


def _legal(region: FeedForwardRegion, target: tvm.target.Target) -> Verdict:
    """Ask the target's table for every result of both layers."""
    chains = (chain_of(spec, output) for spec in (region.spec.first, region.spec.second) for output in spec.outputs)
    return next((verdict for chain in chains if not (verdict := allowed(chain, target)).fired), accept())


def _lower(
    site: Site, region: FeedForwardRegion, outer: Outer, machine: Machine
) -> tuple[tirx.PrimFunc, list[relax.Expr]]:
    regions = region.first, region.second
    layers = [norm_folded(site, part, outer) for part in regions]
    block = FeedForward(*(part.spec for part in layers))
    cuts = cut(block, machine)
    operands: list[relax.Expr] = []
    for part, folded, plan in zip(regions, layers, (cuts.first, cuts.second)):
        operands += linear_operands(site.builder, part, outer, folded, plan, with_x=not operands)
    return kernel(block, machine), operands


def LowerFusedFeedForward(target: tvm.target.Target | None = None) -> tvm.transform.Pass:
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
    return lowering_pass(_NAME, FEED_FORWARD_REGION, read_feed_forward, _lower, target, _legal)


PASS = PassInfo(_NAME, LowerFusedFeedForward, "lower", REASSOCIATES, doc="Feed-forward regions become kernels.")
