"""Compute attention, and what only moves its operands, as one kernel.

    k = R.concat((past_k, new_k), axis=2); v = R.concat((past_v, new_v), axis=2)
    o = attention(R.permute_dims(q, [0, 2, 1, 3]), k, v, mask)      # Composite = "crossloom.attention"
    y = R.reshape(R.permute_dims(o, [0, 2, 1, 3]), [b, s, heads * d])
->  y = fused_attention(q, past_k, new_k, past_v, new_v, mask)      # Composite = "crossloom.fused_attention"

Fires for every attention that :mod:`crossloom.passes.regions.attention` can read, whatever its masks, layouts, groups
and sizes.  Views in front (reshape, permute_dims, slices, split, a layer's cache taken from a stack) and behind join
where elements of a head stay neighbours; so do repeated heads, and a cache and what is appended to it are read from
where they are.  Who else reads one of these values still does: it is made beside the kernel.
Never for types other than float16, float32 and float64, for heads of symbolic size or number, nor for operands whose
batch or heads differ.  A mask that is proved to be causal, with a window or without, is not read, and keys that it
hides are not visited.

Numerics: reassociates (scores, weights and sums are float32 for float16, and only the result is rounded: a row whose
every score a finite mask hides may come out as something else than float16 scores make of it).  Linear in the module's
size.
Source: Milakov & Gimelshein 2018 (arXiv 1805.02867); Dao et al. 2022 (arXiv 2205.14135).
"""

from __future__ import annotations

import math

import numpy as np
import tvm
from tvm import relax

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, Match, Rule, rewrite_pass
from crossloom.schedules.attention import Spec
from crossloom.verdict import Verdict, accept, refuse

from .matching.spelling import replay, replayable
from .regions.attention import ATTENTION, ATTENTION_REGION, Attention, read_attention
from .regions.linear import NoKernel

_NAME = "fuse-attention"


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    try:
        match = _matched(graph, read_attention(graph, root))
        # A view may take a size from elsewhere, which a region of its own could not know.
        return match if replayable(match).fired else _matched(graph, read_attention(graph, root, views=False))
    except NoKernel as problem:
        return refuse("no-kernel", root.name, str(problem))


def _matched(graph: Graph, found: Attention) -> Match:
    captures: dict[str, relax.Expr] = {}
    for name, value in found.inputs.items():
        if isinstance(value, relax.Var) and not any(value.same_as(known) for known in captures.values()):
            captures[name] = value
    return Match(graph, found.result, captures, found.members, {"found": found})


def _worth(m: Match) -> Verdict:
    """Return what is saved: scores and weights are not written, and not read again.

    MACs are those that remain: of scores that a proved mask hides there are none.
    """
    found: Attention = m.facts["found"]
    spec = found.spec
    sizes = (spec.batch, spec.heads, spec.groups, spec.queries, *spec.keys)
    if not all(isinstance(n, int) for n in sizes):
        return accept()
    rows, keys = math.prod(int(n) for n in sizes[:4]), sum(int(n) for n in spec.keys)
    width = tvm.DataType(spec.q.dtype).bits // 8
    seen = rows // max(1, int(spec.queries)) * _pairs(spec, int(spec.queries), keys)
    return accept(bytes_saved=4 * rows * keys * width, macs=seen * (spec.lanes + spec.value_lanes))


def _pairs(spec: Spec, queries: int, keys: int) -> int:
    """Return how many keys the queries see, all together, where no mask tensor tells."""
    if spec.causal is None:
        return queries * keys
    last = np.arange(queries) + int(spec.causal)
    behind = last - spec.window if spec.window is not None else np.full(queries, -1)
    return int(np.sum(np.clip(last, -1, keys - 1) - np.clip(behind, -1, keys - 1)))


def FuseAttention() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    rule = Rule(
        "attention",
        frozenset({ATTENTION}),
        _match,
        lambda site: replay(site, ATTENTION_REGION),
        legal=replayable,
        worth=_worth,
        shared_interior=True,
    )
    return rewrite_pass(_NAME, [rule])


PASS = PassInfo(_NAME, FuseAttention, "fuse", REASSOCIATES, doc="Attention becomes one kernel with online softmax.")
