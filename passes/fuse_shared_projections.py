"""Apply a linear layer once to the rows of several values that it is applied to.

    a = linear(vision, w, b); c = linear(text, w, b)
->  rows = R.concat((R.reshape(vision, ...), R.reshape(text, ...))); y = linear(rows, w, b)
    a, c = R.reshape(R.split(y)...), ...

Fires for layers of one block that take the same weight (and bias) with different values: modality-specific tokens that
go through the same projection, all such projections of the same values together.  Weights are then read once; rows are
copied in front and results behind, so it fires where these are fewer bytes than what is not read again.
Never for values of a symbolic number of rows, of different element types, or where one value depends on another one's
result (a layer applied again and again).

Numerics: reassociates.  Linear in the module's size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import tvm
from tvm import ir, relax

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import (
    Graph,
    GroupRule,
    Match,
    Rule,
    Site,
    apply_groups,
    apply_rules,
    composite_attrs,
    composite_name,
    limit_rewrites,
    per_graph,
    root_name,
)
from crossloom.rewrite.driver import graphs_of
from crossloom.verdict import Ledger, Verdict, accept, refuse

from .matching.spelling import dtype, first_name, results_of, sizes
from .regions.composites import linear
from .regions.growth import bytes_of

_NAME = "fuse-shared-projections"
_LINEAR = "crossloom.linear"
#: Lives within this pass only.
_SHARED = "crossloom.fused_shared_linear"

#: A layer without the value it is applied to: block, layout, weight, bias.
_Layer: TypeAlias = tuple[object, ...]
_Uses: TypeAlias = dict[_Layer, dict[relax.Var, relax.Var]]

#: What is to be grouped at a member: the values, and all members.
_Groups: TypeAlias = dict[relax.Var, tuple[list[relax.Var], list[relax.Var]]]


def _layer(graph: Graph, var: relax.Var) -> _Layer | None:
    callee = graph.callee(var)
    if callee is None or root_name(graph, var) != _LINEAR or var not in graph.block:
        return None
    return (graph.block[var], str(composite_attrs(callee)["weight_layout"]), *graph.value[var].args[1:])


def _uses(graph: Graph) -> _Uses:
    """Return by layer what each value becomes."""
    out: _Uses = {}
    for var in graph.order:
        layer = _layer(graph, var)
        x = graph.value[var].args[0] if layer is not None else None
        if layer is not None and isinstance(x, relax.Var):
            out.setdefault(layer, {}).setdefault(x, var)
    return out


@per_graph
def _groups(graph: Graph) -> _Groups:
    """Return the groups of a function by their first members: all layers that the same values go through."""
    alike: dict[tuple[object, frozenset[relax.Var]], list[dict[relax.Var, relax.Var]]] = {}
    for layer, uses in _uses(graph).items():
        if len(uses) > 1:
            alike.setdefault((layer[0], frozenset(uses)), []).append(uses)
    found: _Groups = {}
    for layers in alike.values():
        members = [var for uses in layers for var in uses.values()]
        found[min(members, key=graph.position.__getitem__)] = list(layers[0]), members
    return found


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    found = _groups(graph).get(root)
    return None if found is None else Match(graph, root, {}, frozenset(found[1]), {"values": found[0]})


def _legal(m: Match) -> Verdict:
    operands = [arg for var in m.interior for arg in m.graph.value[var].args]
    for expr in operands:
        if isinstance(expr, relax.Var) and expr in m.interior:
            return refuse("applied-to-its-own-result", expr.name)
    kinds = {dtype(expr) for expr in (*operands, *m.interior)}
    if len(kinds) > 1:
        return refuse("different-dtypes", m.root.name, ", ".join(sorted(kinds)))
    for x in m.facts["values"]:
        if any(size is None for size in sizes(x) or [None]):
            return refuse("rows-not-known", x.name, "bytes that are saved and bytes that are copied cannot be compared")
        if 0 in (sizes(x) or []):
            return refuse("no-rows", x.name, "nothing is read for it")
    return accept()


def _worth(m: Match) -> Verdict:
    """Return what is saved: weights read again, less rows and results that are written and read once more."""
    graph, values = m.graph, m.facts["values"]
    weights = sum(bytes_of(arg.ty) for var in m.interior for arg in graph.value[var].args[1:])
    again = weights - weights // len(values)
    copied = 2 * sum(bytes_of(expr.ty) for expr in (*values, *m.interior))
    if again <= copied:
        return refuse(
            "copies-cost-more",
            m.root.name,
            f"{again} bytes of weights against {copied} bytes",
            bytes_saved=again - copied,
        )
    depths = {v: (sizes(graph.value[v].args[0]) or [0])[-1] or 0 for v in m.interior}
    macs = sum(depth * math.prod(s or 0 for s in sizes(v) or [0]) for v, depth in depths.items())
    return accept(bytes_saved=again - copied, macs=macs)


def _apply(site: Site) -> relax.Expr:
    """Return the results of a shared region, from one application of each of its layers."""
    builder = site.builder
    callee = site.match.graph.callee(site.match.root)
    assert callee is not None
    graph = Graph(site.match.graph.name, callee, site.match.graph.mod)
    by_layer = _uses(graph)
    outer = {param: site[param.name] for param in callee.params}
    values = list(next(iter(by_layer.values())))
    counts: list[int] = [math.prod(s or 0 for s in (sizes(x) or [])[:-1]) for x in values]
    flat = [
        outer[x] if len(sizes(x) or ()) == 2 else builder.emit(relax.op.reshape(outer[x], [n, (sizes(x) or [])[-1]]))
        for x, n in zip(values, counts)
    ]
    rows = builder.emit(relax.op.concat(flat, 0))
    bounds = [sum(counts[: i + 1]) for i in range(len(counts) - 1)]
    results: dict[relax.Var, relax.Expr] = {}
    for (_, layout, *operands), uses in by_layer.items():
        given = [outer[e] if isinstance(e, relax.Var) else e for e in operands]
        whole = builder.emit(_linear(site, str(layout), rows, given))
        parts = builder.emit(relax.op.split(whole, bounds, 0))
        for i, x in enumerate(values):
            part = builder.emit(relax.TupleGetItem(parts, i))
            shape = sizes(uses[x]) or []
            results[uses[x]] = part if len(shape) == 2 else builder.emit(relax.op.reshape(part, shape))
    found = [results[first_name(graph, field)] for field in results_of(graph)]
    return found[0] if len(found) == 1 else relax.Tuple(found)


def _linear(site: Site, layout: str, rows: relax.Expr, operands: Sequence[relax.Expr]) -> relax.Call:
    """Return a layer of all rows."""
    weight, *biases = operands
    bias = biases[0] if biases else None
    if bias is not None and len(sizes(bias) or ()) != 1:
        bias = site.builder.emit(relax.op.reshape(bias, (sizes(bias) or [])[-1:]))
    return linear(site, rows, weight, bias, layout)


def _captured(graph: Graph, root: relax.Var) -> Match:
    return Match(graph, root, graph.operands(root), frozenset((root,)))


def FuseSharedProjections() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    group = GroupRule("shared-projections", frozenset({_LINEAR}), _match, _SHARED, legal=_legal, worth=_worth)
    apply = Rule("shared-projections", frozenset({_SHARED}), _captured, _apply)

    @tvm.transform.module_pass(opt_level=0, name=_NAME)
    def run(mod: ir.IRModule, ctx: tvm.transform.PassContext) -> ir.IRModule:
        grouped = apply_groups(mod, [group], _NAME)
        if grouped is mod:
            return mod
        # One rewrite in two steps: the second is told by the first, and never held back.
        calls = ((g.name, v) for _, g in graphs_of(grouped) for v in g.order if root_name(g, v) == _SHARED)
        with Ledger(), limit_rewrites({(apply.name, name, var.name): 1 for name, var in calls}):
            out = apply_rules(grouped, [apply], _NAME)
        kept = {g: f for g, f in out.functions_items() if composite_name(f) != _SHARED}
        result = ir.IRModule(kept, attrs=out.attrs)
        relax.analysis.well_formed(result)
        return result

    return run


PASS = PassInfo(_NAME, FuseSharedProjections, "fuse", REASSOCIATES, doc="A layer of several values is applied once.")
