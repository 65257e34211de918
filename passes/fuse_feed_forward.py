"""Keep what is between the layers of a feed-forward block out of memory: both layers become one region.

    h = fused_linear(x, g, gate, up)              # norm or rotary, first layers, activation or gate
    y = fused_linear(h, down, x)                  # second layer, residual
->  y = fused_feed_forward(x, g, gate, up, down)  # fused_linear and fused_linear, h in chunks of rows

Fires for a linear layer or fused linear region whose x is the only result of a region with an activation, gated or not,
with whatever the two regions hold in front and behind: norms, a rotation of features (1-D or 2-D), biases, residual.
Run behind all passes that grow these regions.  The region's body calls the two, so that it stays executable, and each
of them readable.
Never when the values between are read elsewhere too, or are a result: they have to exist then anyway; nor where the
first region has other results beside them, turns them, or lays them out in another way than by rows.

Numerics: reassociates (between the layers float16 is not rounded any more).  Linear in the module's size.
"""

from __future__ import annotations

import tvm
from tvm import relax

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, Match, Rule, Site, outline, rewrite_pass, root_name
from crossloom.schedules.feed_forward import chunk_bytes
from crossloom.schedules.fused_linear.plan import rows_of
from crossloom.verdict import Verdict, accept, refuse

from .regions.feed_forward import FEED_FORWARD_REGION, LAYERS, layer_of, read_pair
from .regions.growth import bytes_of
from .regions.linear import LINEAR_REGION, NoKernel

_NAME = "fuse-feed-forward"


def _hidden(graph: Graph, root: relax.Var) -> relax.Var | None:
    """Return the values with an activation that a layer takes for its x, where a region of linear layers makes them."""
    made = [arg for arg in graph.value[root].args if arg in graph.value and root_name(graph, arg) == LINEAR_REGION]
    for var in made:
        try:
            outputs = layer_of(graph, var).spec.outputs
        except NoKernel:
            continue
        if outputs[0].activation or outputs[0].gate is not None:
            return var
    return None


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    hidden = _hidden(graph, root)
    if hidden is None:
        return None
    if graph.block.get(hidden) is None or graph.block.get(hidden) != graph.block.get(root):
        return refuse("outside-a-dataflow-block", hidden.name, "the two layers are not in one")
    try:
        found = read_pair(graph, hidden, root)
    except NoKernel as problem:
        return refuse("no-kernel", root.name, str(problem))
    given = dict.fromkeys((*graph.value[hidden].args, *graph.value[root].args))
    captures = {f"a{i}": expr for i, expr in enumerate(expr for expr in given if not expr.same_as(hidden))}
    return Match(graph, root, captures, frozenset((hidden, root)), {"hidden": hidden, "region": found})


def _worth(m: Match) -> Verdict:
    """Return what is saved: of the values between, a chunk is written and read instead of all."""
    block = m.facts["region"].spec
    rows = rows_of(block.first) or 0
    kept = min(chunk_bytes(block), rows * block.hidden * tvm.DataType(block.second.sum_dtype).bits // 8)
    return accept(bytes_saved=2 * max(0, bytes_of(m.facts["hidden"].ty) - kept))


def _replace(site: Site) -> relax.Expr:
    graph, hidden = site.match.graph, site.match.facts["hidden"]
    first, second = graph.value[hidden], graph.value[site.match.root]
    names = {expr: name for name, expr in site.match.captures.items()}

    def body(builder: relax.BlockBuilder, **given: relax.Var) -> relax.Expr:
        between = builder.emit(relax.Call(first.op, [given[names[arg]] for arg in first.args]))
        return relax.Call(second.op, [between if arg.same_as(hidden) else given[names[arg]] for arg in second.args])

    return outline(site, FEED_FORWARD_REGION, {name: site[name] for name in site.match.captures}, body)


def FuseFeedForward() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    return rewrite_pass(_NAME, [Rule("feed-forward", LAYERS, _match, _replace, worth=_worth)])


PASS = PassInfo(_NAME, FuseFeedForward, "fuse", REASSOCIATES, doc="Both layers of a feed-forward block become one.")
