"""Compute linear layers of one value side by side.

    q = linear(x, wq); k = linear(x, wk, bk); v = linear(x, wv)
->  q, k, v = fused_linear(x, wq, wk, bk, wv)

Fires for two or more linear layers (``crossloom.linear``) of the same value in one block: query, key and value, gate
and up, experts that all see every token.  Weights may be parameters or constants, of different widths and layouts;
biases may be there for some of them only, as rows or as ``(1, 1, n)``.
Never for layers of different element types, nor where one layer's weight depends on another's result; a layer that is
the only one of its input stays as it is.

Numerics: reassociates.  Linear in the module's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import tvm
from tvm import relax

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, GroupRule, Match, group_pass, root_name
from crossloom.verdict import Verdict, accept, refuse

from .matching.spelling import dtype, sizes
from .regions.growth import bytes_of
from .regions.linear import LINEAR_REGION

_NAME = "fuse-parallel-projections"
_LINEAR = "crossloom.linear"


def _layers(graph: Graph, x: relax.Var, root: relax.Var) -> Iterator[relax.Var]:
    """Yield the linear layers of x in the root's block."""
    for reader in dict.fromkeys(graph.users.get(x, ())):
        if root_name(graph, reader) == _LINEAR and graph.value[reader].args[0].same_as(x):
            if graph.block.get(reader) == graph.block.get(root):
                yield reader


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    x = graph.value[root].args[0]
    # The group is found at its first member.
    if not isinstance(x, relax.Var) or not next(_layers(graph, x, root)).same_as(root):
        return None
    layers = list(_layers(graph, x, root))
    return Match(graph, root, {"x": x}, frozenset(layers)) if len(layers) > 1 else None


def _legal(m: Match) -> Verdict:
    kinds = {dtype(v) for v in m.interior} | {dtype(a) for v in m.interior for a in m.graph.value[v].args}
    if len(kinds) > 1:
        return refuse("different-dtypes", m.root.name, ", ".join(sorted(kinds)))
    return accept()


def _worth(m: Match) -> Verdict:
    """Return what is saved: x is read once.

    However wide the layers are together, none is slower for it: a kernel goes over them in groups of columns.
    """
    depth = (sizes(m["x"]) or [0])[-1] or 0
    columns = sum(math.prod(s or 0 for s in sizes(v) or [0]) for v in m.interior)
    return accept(bytes_saved=(len(m.interior) - 1) * bytes_of(m["x"].ty), macs=columns * depth)


def FuseParallelProjections() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    rule = GroupRule("parallel-projections", frozenset({_LINEAR}), _match, LINEAR_REGION, legal=_legal, worth=_worth)
    return group_pass(_NAME, [rule])


PASS = PassInfo(_NAME, FuseParallelProjections, "fuse", REASSOCIATES, doc="Linear layers of one value become one.")
