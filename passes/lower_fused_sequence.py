"""Replace fused sequence regions by kernels.

    y = fused_sequence(features, w, table, ids)   # Composite = "crossloom.fused_sequence"
->  p = R.permute_dims(R.reshape(w, ...), ...)    # on weights alone: folded when a model is built
    y = R.call_tir(fused_sequence_kernel, (features, p, table, ids), ...)

Fires for every region that :mod:`crossloom.passes.regions.sequence` can read.
Never for a region that holds anything else: it stays executable as it is, and the verdict says what it was.

Numerics: reassociates (sums of products in another order, float32 sums for float16).  Linear in the module's size.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax, tirx

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, Site
from crossloom.schedules.fused_linear import plan
from crossloom.schedules.fused_sequence import kernel
from crossloom.schedules.machine import Machine

from .regions.linear import NoKernel
from .regions.lowering import Outer, lowering_pass
from .regions.operands import layers_of, linear_operands
from .regions.parts import Linear, Problem
from .regions.sequence import SEQUENCE_REGION, SequenceRegion, read_sequence

_NAME = "lower-fused-sequence"


def _read(graph: Graph) -> SequenceRegion:
    try:
        region = read_sequence(graph, graph.func.body.body)
    except Problem as problem:
        raise NoKernel(problem.verdict.code) from problem
    calls = [v for v in graph.order if isinstance(graph.value[v], relax.Call)]
    if region is None or any(v not in region.inside for v in calls):
        raise NoKernel("it holds something that is no part of a sequence")
    return region


def _lower(
    site: Site, region: SequenceRegion, outer: Outer, machine: Machine
) -> tuple[tirx.PrimFunc, Sequence[relax.Expr]]:
    operands: list[relax.Expr] = []
    for operand in region.operands:
        if not isinstance(operand, Linear):
            operands.append(outer(operand))
            continue

        def handed(expr: relax.Expr, names: dict[str, relax.Expr] = operand.names) -> relax.Expr:
            return outer(names[expr.name]) if isinstance(expr, relax.Var) else expr

        linear = operand.region
        layers = layers_of(linear, handed)
        operands += linear_operands(site.builder, linear, handed, layers, plan(linear.spec, machine))
    return kernel(region.spec, machine), operands


def LowerFusedSequence(target: tvm.target.Target | None = None) -> tvm.transform.Pass:
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
    return lowering_pass(_NAME, SEQUENCE_REGION, _read, _lower, target)


PASS = PassInfo(_NAME, LowerFusedSequence, "lower", REASSOCIATES, doc="Fused sequence regions become kernels.")
