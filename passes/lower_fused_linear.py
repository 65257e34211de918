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
from tvm import relax

from crossloom.errors import UnsupportedTarget
from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, Match, Rule, Site, rewrite_pass
from crossloom.schedules.fused_linear import Norm, kernel, plan
from crossloom.schedules.machine import Machine
from crossloom.schedules.templates import allowed, chain_of
from crossloom.verdict import Verdict, refuse

from .matching.spelling import is_weight, uncast
from .regions.linear import LINEAR_REGION, NoKernel, Region, read_linear
from .regions.operands import linear_operands

_NAME = "lower-fused-linear"


def _match(graph: Graph, root: relax.Var, target: tvm.target.Target | None) -> Match | Verdict | None:
    callee = graph.callee(root)
    call = graph.value[root]
    if callee is None or not isinstance(call, relax.Call):
        return None
    try:
        region = read_linear(Graph(graph.name, callee, graph.mod))
    except NoKernel as problem:
        return refuse("no-kernel", root.name, str(problem))
    for output in region.spec.outputs if target is not None else ():
        verdict = allowed(chain_of(region.spec, output), target)
        if not verdict.fired:
            return verdict
    captures = {param.name: arg for param, arg in zip(callee.params, call.args)}
    return Match(graph, root, captures, frozenset((root,)), {"region": region})


def _lower(site: Site, machine: Machine) -> relax.Expr:
    region: Region = site.match.facts["region"]

    def outer(expr: relax.Expr) -> relax.Expr:
        return site[expr.name] if isinstance(expr, relax.Var) else expr

    spec, norm = region.spec, [outer(e) for e in region.norm]
    weights = [(outer(w), layout) for w, layout in region.weights]
    if _norm_folds(site.match, region):
        factor, norm = norm[0], []
        weights = [(_scaled(site.builder, weight, layout, factor), layout) for weight, layout in weights]
        spec = replace(spec, norm=Norm("rms", spec.norm.epsilon))
    cut = plan(spec, machine)
    operands = linear_operands(site.builder, region, outer, spec, cut, norm, weights)
    func = kernel(spec, machine)
    gvar = site.builder.add_func(func, "fused_linear_kernel")
    ty = site.match.root.ty
    return relax.call_tir(gvar, operands, list(ty.fields) if isinstance(ty, relax.TupleType) else ty)


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

    def current() -> tvm.target.Target | None:
        return target or tvm.target.Target.current(allow_none=True)

    def match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
        return _match(graph, root, current())

    def lower(site: Site) -> relax.Expr:
        found = current()
        if found is None:
            raise UnsupportedTarget(
                "LowerFusedLinear knows no target", "pass one, or run it inside `with tvm.target.Target(...)`"
            )
        return _lower(site, Machine.of(found))

    return rewrite_pass(_NAME, [Rule("lower-fused-linear", frozenset({LINEAR_REGION}), match, lower)])


PASS = PassInfo(_NAME, LowerFusedLinear, "lower", REASSOCIATES, doc="Fused linear regions become kernels.")
