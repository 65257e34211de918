"""Write what a step appends to its caches with one kernel.

    k0 = R.concat((past_k0, new_k0), axis=2); v0 = R.concat((past_v0, new_v0), axis=2); k1 = ...
->  k0, v0, k1, ... = fused_append(past_k0, new_k0, past_v0, new_v0, past_k1, ...)   # "crossloom.fused_append"

Fires for two or more joins of values along an axis that only the function's result reads: attention has been given the
kept and the new keys apart, so that all that is left of a cache that grows is a copy.  Run it after ``fuse-attention``.
Never for joins that something in the function reads (they may have to be there early), nor for values of unknown shape.

Numerics: exact.  Linear in the module's size.
"""

from __future__ import annotations

import tvm
from tvm import relax

from crossloom.numerics import EXACT
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, GroupRule, Match, group_pass, per_graph
from crossloom.verdict import Verdict, accept, refuse

from .regions.append import APPEND_REGION, read_append
from .regions.linear import kernel_takes

_NAME = "fuse-cache-append"


def _is_append(graph: Graph, var: relax.Var) -> bool:
    """Return whether a join of values goes into the function's result and nowhere else."""
    call = graph.value[var]
    if graph.op(var) != "relax.concat" or not isinstance(call, relax.Call) or graph.scope[var] != 0:
        return False
    readers = graph.users.get(var, [])
    # A tuple of results, or another name of one.
    kept = all(isinstance(graph.value[user], relax.Tuple | relax.Var) and user in graph.escapes for user in readers)
    return kept and (bool(readers) or var in graph.escapes)


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    if not _is_append(graph, root):
        return None
    found = _appends(graph).get(graph.block.get(root, -1), [])
    # The group is found at its first member.
    if not found or not found[0].same_as(root):
        return None
    if len(found) < 2:
        return refuse("nothing-beside-it", root.name, "one join is a kernel already")
    return Match(graph, root, {}, frozenset(found))


@per_graph
def _appends(graph: Graph) -> dict[int, list[relax.Var]]:
    """Return the appends of every dataflow block."""
    found: dict[int, list[relax.Var]] = {}
    for var in graph.order:
        if var in graph.block and _is_append(graph, var):
            found.setdefault(graph.block[var], []).append(var)
    return found


def _legal(m: Match) -> Verdict:
    return kernel_takes(m, APPEND_REGION, read_append)


def _worth(m: Match) -> Verdict:
    return accept(detail=f"{len(m.interior)} joins")


def FuseCacheAppend() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    roots = frozenset({"relax.concat"})
    return group_pass(_NAME, [GroupRule("cache-append", roots, _match, APPEND_REGION, legal=_legal, worth=_worth)])


PASS = PassInfo(_NAME, FuseCacheAppend, "fuse", EXACT, doc="Caches and what is appended to them become one region.")
