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

from dataclasses import replace

import tvm
from tvm import relax, tirx

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Match, Site
from crossloom.schedules.fused_linear import Norm, kernel, plan
from crossloom.schedules.machine import Machine
from crossloom.schedules.templates import allowed, chain_of
from crossloom.verdict import Verdict, accept

from .matching.spelling import is_weight, uncast
from .regions.linear import LINEAR_REGION, Region, read_linear
from .regions.lowering import Outer, lowering_pass
from .regions.operands import linear_operands

_NAME = "lower-fused-linear"


def _legal(region: Region, target: tvm.target.Target) -> Verdict:
    """Ask the target's table for every result."""
    verdicts = (allowed(chain_of(region.spec, output), target) for output in region.spec.outputs)
    return next((verdict for verdict in verdicts if not verdict.fired), accept())


def _lower(site: Site, region: Region, outer: Outer, machine: Machine) -> tuple[tirx.PrimFunc, list[relax.Expr]]:
    spec, norm = region.spec, [outer(e) for e in region.norm]
    weights = [(outer(w), layout) for w, layout in region.weights]
    if _norm_folds(site.match, region):
        factor, norm = norm[0], []
        weights = [(_scaled(site.builder, weight, layout, factor), layout) for weight, layout in weights]
        spec = replace(spec, norm=Norm("rms", spec.norm.epsilon))
    operands = linear_operands(site.builder, region, outer, spec, plan(spec, machine), norm, weights)
    return kernel(spec, machine), operands


def _norm_folds(match: Match, region: Region) -> bool:
    """Return whether an RMS norm's weight can be multiplied into weights once and for all."""
    norm = region.spec.norm
    if norm is None or norm.kind != "rms" or not norm.weight or norm.bias or region.spec.dtype == "float16":
        return False
    if region.spec.turn is not None:
        return False  # A weight before a rotation is not one behind it.
    operands = (*region.norm, *(weight for weight, _ in region.weights))
    captured = (match.captures[e.name] if isinstance(e, relax.Var) else e for e in operands)
    return all(is_weight(match.graph, uncast(match.graph, expr)) for expr in captured)


def _scaled(builder: relax.BlockBuilder, weight: relax.Expr, layout: str, factor: relax.Expr) -> relax.Expr:
    """Return a weight whose inputs are multiplied by a factor each."""
    if layout == "in_out":
        factor = builder.emit(relax.op.expand_dims(factor, 1))
    return builder.emit(relax.op.multiply(weight, factor))


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
