"""Make keys and values of all layers' cross-attention in one product of the encoder's states.

    k0 = linear(states, wk0); v0 = linear(states, wv0); ... attention(q0, k0, v0) ... k1 = linear(states, wk1) ...
->  k0, v0, k1, v1 = fused_linear(states, wk0, wv0, wk1, wv1)      # role = "cross_kv", layers = 2

Fires for two or more linear layers of one value that an attention reads as keys or values, through views to heads
(taken along) and however far apart, where its queries are made from another value.
Never where the layers differ in type, nor for self-attention: its queries belong with its keys and values.

Where the states are an input of the entry, the verdict says how much is computed again in every call with the same
states; :func:`crossloom.passes.cross_kv_entry.split_cross_kv` makes an entry of its own of that.

Numerics: reassociates.  Linear in the module's size.  Source: transformers' Whisper, T5, BART.
"""

from __future__ import annotations

import math

import tvm
from tvm import relax

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, GroupRule, Match, group_pass, per_graph
from crossloom.verdict import Verdict, accept, refuse

from .matching.cross_attention import LINEAR, Projection, cross_projections
from .matching.spelling import dtype, sizes
from .regions.growth import bytes_of
from .regions.linear import LINEAR_REGION, kernel_takes

_NAME = "fuse-cross-attention-kv"


def _taken(graph: Graph, projections: list[Projection]) -> frozenset[relax.Var]:
    """Return the layers, and their views as far as nothing else reads what is in between."""
    out: list[relax.Var] = []
    for projection in projections:
        out.append(projection.layer)
        before = projection.layer
        for view in projection.views:
            if graph.uses(before) > 1:
                break
            out.append(view)
            before = view
    return frozenset(out)


@per_graph
def _groups(graph: Graph) -> dict[relax.Var, list[Projection]]:
    """Return the projections of each value in each block, under the first layer of them."""
    groups: dict[tuple[relax.Var, int | None], list[Projection]] = {}
    for projection in cross_projections(graph):
        groups.setdefault((projection.states, graph.block.get(projection.layer)), []).append(projection)
    firsts = {min((p.layer for p in g), key=graph.position.__getitem__): g for g in groups.values()}
    return {first: group for first, group in firsts.items() if len({p.layer for p in group}) > 1}


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    # The group is found at its first member.
    same = _groups(graph).get(root)
    if same is None:
        return None
    kinds = {dtype(e) for p in same for e in (p.layer, *graph.value[p.layer].args)}
    if len(kinds) > 1:
        return refuse("different-dtypes", root.name, ", ".join(sorted(kinds)))
    facts = {"projections": same, "states": same[0].states}
    whole = Match(graph, root, {}, _taken(graph, same), facts)
    if kernel_takes(whole).fired:
        return whole
    bare = Match(graph, root, {}, frozenset(p.layer for p in same), facts)
    verdict = kernel_takes(bare)
    return bare if verdict.fired else verdict


def _worth(m: Match) -> Verdict:
    """Return what is saved (the states are read once), and what every call computes again."""
    graph, states = m.graph, m.facts["states"]
    shape = sizes(states) or [0]
    layers = {p.layer for p in m.facts["projections"]}
    columns = sum((sizes(layer) or [0])[-1] or 0 for layer in layers)
    # A symbolic number of rows counts as one.
    macs = math.prod(s or 1 for s in shape[:-1]) * (shape[-1] or 0) * columns
    detail = ""
    if any(states.same_as(p) for p in graph.func.params) and states not in graph.weights:
        detail = (
            f"{macs} multiply-accumulates of an input are computed again in every call; split_cross_kv does so once"
        )
    return accept(detail=detail, bytes_saved=(len(layers) - 1) * bytes_of(states.ty), macs=macs)


def FuseCrossAttentionKV() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    rule = GroupRule(
        "cross-attention-kv",
        frozenset({LINEAR}),
        _match,
        LINEAR_REGION,
        attrs=lambda m: {"role": "cross_kv", "layers": len({p.attention for p in m.facts["projections"]})},
        worth=_worth,
    )
    return group_pass(_NAME, [rule])


PASS = PassInfo(_NAME, FuseCrossAttentionKV, "fuse", REASSOCIATES, doc="Cross-attention's keys and values become one.")
