"""Turn features while the linear layers behind load them: rotary embedding, MLP, activation as one region.

    r = rotary(x, cos, sin); h = fused_linear(r, up)        # up to the activation, see FuseGatedMLP
->  h = fused_linear(x, cos, sin, up)                       # the rotation is the region's first line

Fires for a rotation (1-D or 2-D, any convention of ``crossloom.rotary``, of the whole row or of heads in it) whose
result, through views and casts, is read by linear layers and fused linear regions of one block only: plain and gated
MLPs and what else is linear.  Views in front of it come along.  The layer behind the activation joins later, see
:mod:`crossloom.passes.fuse_feed_forward`.
Never when something else reads the rotated features, which have to exist then anyway, nor for what
:mod:`crossloom.passes.regions.linear` cannot read.

Numerics: reassociates (float16 is rounded behind the sums only).  Linear in the module's size.
Source: Su et al. 2021; 2-D rotary: Heo et al. 2024.
"""

from __future__ import annotations

import tvm
from tvm import relax

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, GroupRule, Match, group_pass, root_name
from crossloom.verdict import Verdict, accept, refuse

from .regions.growth import bytes_of, with_table_views
from .regions.linear import LINEAR_REGION, MOVES, kernel_takes

_NAME = "fuse-rotary-mlp"
_ROTARY = "crossloom.rotary"
_LINEAR = frozenset({"crossloom.linear", LINEAR_REGION})
_VIEWS = frozenset({"relax.astype", *MOVES})


def _readers(graph: Graph, root: relax.Var) -> set[relax.Var] | Verdict:
    """Return a value with the views and linear layers that read it, and the names of their results."""
    members, stack = {root}, [root]
    while stack:
        var = stack.pop()
        if var in graph.escapes or not graph.users.get(var):
            return refuse("rotated-read-elsewhere", var.name, "it is a result, so it has to exist anyway")
        for user in dict.fromkeys(graph.users[var]):
            name = root_name(graph, user)
            if user in members:
                continue
            if name in _LINEAR and graph.value[user].args[0].same_as(var):
                members.add(user)
                # The results of a region of several, by name.
                items = graph.users.get(user, ())
                members.update(v for v in items if isinstance(graph.value[v], relax.TupleGetItem))
            elif name in _VIEWS and graph.value[user].args[0].same_as(var):
                members.add(user)
                stack.append(user)
            else:
                return refuse("rotated-read-elsewhere", user.name, "it has to exist anyway")
    return members


def _in_front(graph: Graph, root: relax.Var) -> list[relax.Var]:
    """Return the views in front of a rotation that nothing else reads, nearest first."""
    out: list[relax.Var] = []
    at = graph.value[root].args[0]
    while isinstance(at, relax.Var) and at in graph.value and graph.op(at) in _VIEWS and graph.uses(at) == 1:
        if not isinstance(graph.value[at], relax.Call) or graph.block.get(at) != graph.block.get(root):
            break
        out.append(at)
        at = graph.value[at].args[0]
    return out


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    found = _readers(graph, root)
    if isinstance(found, Verdict):
        return found
    front = _in_front(graph, root)
    refusal: Verdict | None = None
    # As many views in front as a kernel takes; why not all of them are taken is told where none are.
    for count in range(len(front), -1, -1):
        match = Match(graph, root, {}, with_table_views(graph, {*found, *front[:count]}))
        verdict = kernel_takes(match)
        if verdict.fired:
            return match
        refusal = refusal or verdict
    return refusal


def _worth(m: Match) -> Verdict:
    """Return what is saved: the rotated features are not written and read again."""
    return accept(bytes_saved=2 * bytes_of(m.root.ty))


def FuseRotaryMLP() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    return group_pass(_NAME, [GroupRule("rotary-mlp", frozenset({_ROTARY}), _match, LINEAR_REGION, worth=_worth)])


PASS = PassInfo(_NAME, FuseRotaryMLP, "fuse", REASSOCIATES, doc="Rotary of features joins the layers that read them.")
