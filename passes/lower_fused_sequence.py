"""Replace fused sequence regions by kernels.

    y = fused_sequence(features, w, table, ids)   # Composite = "crossloom.fused_sequence"
->  p = R.permute_dims(R.reshape(w, ...), ...)    # on weights alone: folded when a model is built
    y = R.call_tir(fused_sequence_kernel, (features, p, table, ids), ...)

Fires for every region that :mod:`crossloom.passes.regions.sequence` can read.
Never for a region that holds anything else: it stays executable as it is, and the verdict says what it was.

Numerics: reassociates (sums of products in another order, float32 sums for float16).  Linear in the module's size.
"""

from __future__ import annotations

import tvm
from tvm import relax

from crossloom.errors import UnsupportedTarget
from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, Match, Rule, Site, rewrite_pass
from crossloom.schedules.fused_linear import plan
from crossloom.schedules.fused_sequence import kernel
from crossloom.schedules.machine import Machine
from crossloom.verdict import Verdict, refuse

from .regions.operands import linear_operands
from .regions.parts import Linear, Problem
from .regions.sequence import SEQUENCE_REGION, SequenceRegion, read_sequence

_NAME = "lower-fused-sequence"


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    callee = graph.callee(root)
    call = graph.value[root]
    if callee is None or not isinstance(call, relax.Call):
        return None
    inner = Graph(graph.name, callee, graph.mod)
    try:
        region = read_sequence(inner, callee.body.body)
    except Problem:
        region = None
    if region is None or any(v not in region.inside and inner.value[v].ty is not None for v in _computed(inner)):
        return refuse("no-kernel", root.name, "it holds something that is no part of a sequence")
    captures = {param.name: arg for param, arg in zip(callee.params, call.args)}
    return Match(graph, root, captures, frozenset((root,)), {"region": region})


def _computed(graph: Graph) -> list[relax.Var]:
    """Return the bindings that are read by what the region returns, but other names of them."""
    return [v for v in graph.order if isinstance(graph.value[v], relax.Call)]


def _lower(site: Site, machine: Machine) -> relax.Expr:
    region: SequenceRegion = site.match.facts["region"]

    def outer(expr: relax.Expr) -> relax.Expr:
        return site[expr.name] if isinstance(expr, relax.Var) else expr

    operands: list[relax.Expr] = []
    for operand in region.operands:
        if not isinstance(operand, Linear):
            operands.append(outer(operand))
            continue

        def handed(expr: relax.Expr, names: dict[str, relax.Expr] = operand.names) -> relax.Expr:
            return outer(names[expr.name]) if isinstance(expr, relax.Var) else expr

        linear, spec = operand.region, operand.region.spec
        norm, weights = [handed(e) for e in linear.norm], [(handed(w), layout) for w, layout in linear.weights]
        operands += linear_operands(site.builder, linear, handed, spec, plan(spec, machine), norm, weights)
    gvar = site.builder.add_func(kernel(region.spec, machine), "fused_sequence_kernel")
    return relax.call_tir(gvar, operands, site.match.root.ty)


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

    def lower(site: Site) -> relax.Expr:
        found = target or tvm.target.Target.current(allow_none=True)
        if found is None:
            raise UnsupportedTarget(
                "LowerFusedSequence knows no target", "pass one, or run it inside `with tvm.target.Target(...)`"
            )
        return _lower(site, Machine.of(found))

    return rewrite_pass(_NAME, [Rule("lower-fused-sequence", frozenset({SEQUENCE_REGION}), _match, lower)])


PASS = PassInfo(_NAME, LowerFusedSequence, "lower", REASSOCIATES, doc="Fused sequence regions become kernels.")
