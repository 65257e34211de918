"""Give linear layers the views and rotations behind their results: q, k, v come out rotated, as attention reads them.

    t = linear(x, w); q, k, v = R.split(R.reshape(t, [b, s, 3 * h, d]), 3, 2)
    q = rotary(R.permute_dims(q, [0, 2, 1, 3]), cos, sin); ...
->  q, k, v = fused_linear(x, w, cos, sin)

Fires for a linear layer or fused linear region (one packed layer, or several of one value) with rotations behind it,
each through views that move columns or whole rows (reshape to heads, permute_dims, split, slices, takes of constant
places), norms of heads (query and key norms) and casts there and back; results that are only moved (v) come along.
Every convention that ``crossloom.rotary`` knows, tables of any broadcast form, of another float type than x, shared or
not.  Without a rotation (CLIP, Whisper) it fires where views behind the layers would copy.
Never for a rotation of what no linear layer made; for a value that is read on the way, which has to exist anyway; nor
for what :mod:`crossloom.passes.regions.linear` cannot read: that stays outside, and a verdict says why.

Numerics: reassociates (for float16 a result is rounded once).  Linear in the module's size.
Source: Su et al. 2021; heads' norms: Henry et al. 2020, Qwen3.
"""

from __future__ import annotations

import tvm
from tvm import relax

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, GroupRule, Match, group_pass, root_name
from crossloom.verdict import Verdict, accept, refuse

from .matching.spelling import scalar
from .regions.growth import Growth, bytes_of, grow, with_table_views
from .regions.linear import LINEAR_REGION, MOVES

_NAME = "fuse-rotary-projection"
_ROTARY = "crossloom.rotary"
_LINEAR = frozenset({"crossloom.linear", LINEAR_REGION})
_THROUGH = frozenset({_ROTARY, "crossloom.rms_norm", "crossloom.layer_norm", "relax.astype", "relax.split", *MOVES})
#: Views that a kernel of their own would copy.
_COPIES = frozenset({"relax.permute_dims", "relax.split", "relax.strided_slice", "relax.take"})


def _is_step(graph: Graph, var: relax.Var) -> bool:
    """Return whether a kernel may do it behind a sum: a move, a norm, a rotation, a cast, or a factor (of queries)."""
    if graph.op(var) == "relax.multiply" and isinstance(graph.value[var], relax.Call):
        return scalar(graph, graph.value[var].args[1]) is not None
    return root_name(graph, var) in _THROUGH


def _way(graph: Graph, var: relax.Var) -> list[relax.Var]:
    """Return a value and what it is made of by moves, norms and casts, back to a linear layer; [] for any other."""
    out: list[relax.Var] = []
    expr: relax.Expr = var
    while isinstance(expr, relax.Var) and expr in graph.value:
        out.append(expr)
        value, name = graph.value[expr], root_name(graph, expr)
        if name in _LINEAR and isinstance(value, relax.Call):
            return out
        if isinstance(value, relax.TupleGetItem):
            expr = value.tuple_value
        elif isinstance(value, relax.Call) and _is_step(graph, expr):
            expr = value.args[0]
        else:
            break
    return []


def _left_out(graph: Graph, found: Growth, var: relax.Var) -> Verdict:
    """Return why a step is not among the members: what lies before it, nearest to the layer, tells."""
    way = _way(graph, var)[::-1]
    for step in way:
        if step in found.problems:
            return refuse("no-kernel", step.name, found.problems[step])
    end = next((step for step in way if step in found.ends), var)
    return refuse("intermediate-used-outside", end.name, "it has to exist as it is: it is read elsewhere too")


def _match_rotary(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    way = _way(graph, root)
    if not way:
        return refuse("not-a-projection", root.name, "no linear layer makes what is rotated")
    found = grow(graph, way[-1], lambda var: _is_step(graph, var))
    if root not in found.members:
        return _left_out(graph, found, root)
    return Match(graph, root, {}, with_table_views(graph, found.members))


def _match_moved(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    found = grow(graph, root, lambda var: _is_step(graph, var) and root_name(graph, var) != _ROTARY)
    copies = [var for var in found.tried if graph.op(var) in _COPIES]
    if not copies:
        return None
    joined = any(var in found.members for var in copies)
    return Match(graph, root, {}, found.members) if joined else _left_out(graph, found, copies[0])


def _worth(m: Match) -> Verdict:
    """Return what is saved: each rotation, norm and copy would have read and written its value once more."""
    passes = [var for var in m.interior if root_name(m.graph, var) in _COPIES | _THROUGH - MOVES]
    return accept(bytes_saved=2 * sum(bytes_of(var.ty) for var in passes))


def FuseRotaryProjection() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    # What a kernel takes is asked of the region's reader step by step, see grow.
    rules = (("rotary-projection", frozenset({_ROTARY}), _match_rotary), ("moved-projection", _LINEAR, _match_moved))
    return group_pass(_NAME, [GroupRule(*rule, LINEAR_REGION, worth=_worth) for rule in rules])


PASS = PassInfo(_NAME, FuseRotaryProjection, "fuse", REASSOCIATES, doc="Heads and rotary join the projections.")
