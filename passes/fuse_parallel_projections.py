"""Compute linear layers of one value side by side.

    q = linear(x, wq); k = linear(x, wk, bk); v = linear(x, wv)
->  q, k, v = fused_linear(x, wq, wk, bk, wv)

Fires for two or more linear layers (``crossloom.linear``) of the same value in one block: query, key and value, gate
and up, experts that all see every token.  Weights may be parameters or constants, of different widths and layouts;
biases may be there for some of them only, as rows or as ``(1, 1, n)``.
Never for layers of different element types, nor where one layer's input depends on another's result.

Numerics: reassociates.  Linear in the module's size.
"""

from __future__ import annotations

import tvm
from tvm import relax

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, GroupRule, Match, composite_name, group_pass
from crossloom.verdict import Verdict, accept, refuse

from .matching.spelling import dtype
from .regions.linear import LINEAR_REGION

_NAME = "fuse-parallel-projections"
_LINEAR = "crossloom.linear"


def _is_linear_of(graph: Graph, var: relax.Var, x: relax.Expr) -> bool:
    callee = graph.callee(var)
    return callee is not None and composite_name(callee) == _LINEAR and graph.value[var].args[0].same_as(x)


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    x = graph.value[root].args[0]
    if not isinstance(x, relax.Var):
        return None
    layers = [v for v in dict.fromkeys(graph.users.get(x, ())) if _is_linear_of(graph, v, x)]
    layers = [v for v in layers if graph.block.get(v) == graph.block.get(root)]
    # The group is found at its first member.
    if len(layers) < 2 or not layers[0].same_as(root):
        return None
    return Match(graph, root, {"x": x}, frozenset(layers))


def _legal(m: Match) -> Verdict:
    kinds = {dtype(v) for v in m.interior} | {dtype(a) for v in m.interior for a in m.graph.value[v].args}
    if len(kinds) > 1:
        return refuse("different-dtypes", m.root.name, ", ".join(sorted(kinds)))
    return accept()


def FuseParallelProjections() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    rule = GroupRule("parallel-projections", frozenset({_LINEAR}), _match, LINEAR_REGION, legal=_legal)
    return group_pass(_NAME, [rule])


PASS = PassInfo(_NAME, FuseParallelProjections, "fuse", REASSOCIATES, doc="Linear layers of one value become one.")
