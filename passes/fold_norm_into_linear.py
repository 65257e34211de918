"""Norm rows where the linear layers behind read them.

    n = rms_norm(x, g); q, k, v = fused_linear(n, wq, wk, wv)
->  q, k, v = fused_linear(x, g, wq, wk, wv)      # the norm is the region's first line

Fires for a norm over the last axis whose readers are linear layers and fused linear regions of one block, all of them:
they become one region.  When it is lowered, weight and bias of the norm, and the mean that a layer norm takes off, go
into constant weights and biases behind it, and what is left of the norm is a factor of each row, applied to the sums:
rows are read once and never written (float32 and float64; float16 keeps the norm in front, in float32, since products
of rounded weights would round twice).
Never when something else reads the norm's result: it has to exist then anyway.

Numerics: reassociates; a row whose mean is many standard deviations from 0, which would cancel in the sums, is summed
less its mean instead.  Linear in the module's size.  Source: the factor commutes with the sum; as SliceGPT (Ashkboos et
al. 2024) folds RMSNorm's weight.
"""

from __future__ import annotations

import tvm
from tvm import relax

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, GroupRule, Match, group_pass, root_name
from crossloom.verdict import Verdict, accept, refuse

from .regions.growth import bytes_of
from .regions.linear import LINEAR_REGION, NoKernel, kernel_takes
from .regions.reader import Reader

_NAME = "fold-norm-into-linear"
_NORMS = frozenset({"crossloom.rms_norm", "crossloom.layer_norm"})
_LINEAR = frozenset({"crossloom.linear", LINEAR_REGION})


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    readers = list(dict.fromkeys(graph.users.get(root, ())))
    layers = [r for r in readers if root_name(graph, r) in _LINEAR and graph.value[r].args[0].same_as(root)]
    if not layers:
        return None
    others = [reader for reader in readers if reader not in layers]
    if others or root in graph.escapes:
        return refuse("norm-read-elsewhere", others[0].name if others else root.name, "its result has to exist anyway")
    members = {root, *layers}
    for layer in layers:
        # The results of a region of several, by name.
        items = [u for u in graph.users.get(layer, ()) if isinstance(graph.value[u], relax.TupleGetItem)]
        members.update(items)
    return Match(graph, root, {}, frozenset(members), {"layers": layers})


def _legal(m: Match) -> Verdict:
    layers = m.facts["layers"]
    if len(layers) > 1:
        return kernel_takes(m)
    # One layer or region is read where it stands: what it gives is what it gave before.
    reader = Reader(m.graph)
    try:
        reader.step(m.root)
        reader.step(layers[0])
        if reader.rows is not None:
            reader.sizes_of_rows(reader.rows)
    except NoKernel:
        # A region that is opened may still take it: one that turns its rows, behind the norm.
        return kernel_takes(m)
    return accept()


def _worth(m: Match) -> Verdict:
    """Return what is saved: the normed rows are not written and read again."""
    return accept(bytes_saved=2 * bytes_of(m.root.ty))


def FoldNormIntoLinear() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    rule = GroupRule("norm-into-linear", _NORMS, _match, LINEAR_REGION, legal=_legal, worth=_worth)
    return group_pass(_NAME, [rule])


PASS = PassInfo(_NAME, FoldNormIntoLinear, "fuse", REASSOCIATES, doc="Norms join the linear layers that read them.")
