"""Sum and norm rows in one pass over memory.

    s = R.add(x, r); n = rms_norm(s, g)
->  s, n = fused_residual_norm(x, r, g)           # n alone where nothing else reads s

Fires for a sum of two values and all RMS and layer norms over the last axis that read it in its block: the sum is a
result too where it is read again (pre-norm residual streams), or is never written (post-norm, as in BERT).  Operands
may be stretched (position embeddings), norms with or without weight and bias, rows of any number.
Never for sums of integers, nor where the row's length or how operands fit together is unknown, nor for norms over
several axes or in types that are neither the sum's nor float32: these stay as they are.

Numerics: reassociates (float16 sums are rounded as before, statistics are float32).  Linear in the module's size.
"""

from __future__ import annotations

import tvm
from tvm import relax

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, GroupRule, Match, composite_name, group_pass
from crossloom.verdict import Verdict, accept

from .matching.spelling import dtype
from .regions.growth import bytes_of
from .regions.linear import kernel_takes
from .regions.residual_norm import NORMS, RESIDUAL_NORM_REGION, read_residual_norm

_NAME = "fuse-residual-norm"


def _names(graph: Graph, expr: relax.Expr) -> list[relax.Var]:
    """Return the names of a value, back to where it is made."""
    out: list[relax.Var] = []
    while isinstance(expr, relax.Var):
        out.append(expr)
        expr = graph.value.get(expr, relax.Tuple([]))
    return out


def _with_cast(graph: Graph, norm: relax.Var) -> list[relax.Var]:
    """Return a norm, and the cast back to the sum's type where nothing else reads it (float16 by way of float32)."""
    readers = list(dict.fromkeys(graph.users.get(norm, ())))
    if len(readers) != 1 or norm in graph.escapes or graph.block.get(readers[0]) != graph.block.get(norm):
        return [norm]
    back = graph.op(readers[0]) == "relax.astype" and dtype(readers[0]) == dtype(graph.value[norm].args[0])
    return [norm, *readers] if back else [norm]


def _takes(graph: Graph, names: list[relax.Var], norm: relax.Var) -> Verdict:
    match = Match(graph, norm, {}, frozenset((*names, *_with_cast(graph, norm))))
    return kernel_takes(match, RESIDUAL_NORM_REGION, read_residual_norm)


def _is_norm_of(graph: Graph, var: relax.Var, names: list[relax.Var]) -> bool:
    callee, call = graph.callee(var), graph.value[var]
    if callee is None or composite_name(callee) not in NORMS or not isinstance(call, relax.Call):
        return False
    return any(call.args[0].same_as(name) for name in names)


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    names = _names(graph, graph.value[root].args[0])
    if not names or graph.call(names[-1], "relax.add") is None:
        return None
    if not (verdict := _takes(graph, names, root)).fired:
        return verdict
    readers = dict.fromkeys(reader for name in names for reader in graph.users.get(name, ()))
    norms = [v for v in readers if graph.block.get(v) == graph.block.get(root) and _is_norm_of(graph, v, names)]
    norms = sorted((v for v in norms if _takes(graph, names, v).fired), key=graph.position.__getitem__)
    if not norms[0].same_as(root):
        return None  # The group is found at its first norm.
    members = frozenset((*names, *(v for norm in norms for v in _with_cast(graph, norm))))
    return Match(graph, root, {}, members, {"sum": names[-1], "names": frozenset(names), "norms": len(norms)})


def _worth(m: Match) -> Verdict:
    """Return what is saved: no norm reads the sum from memory, which is not written where nothing else reads it."""
    graph = m.graph
    outside = (u for name in m.facts["names"] for u in graph.users.get(name, ()) if u not in m.interior)
    kept = any(name in graph.escapes for name in m.facts["names"]) or next(outside, None) is not None
    return accept(bytes_saved=(m.facts["norms"] + (not kept)) * bytes_of(m.facts["sum"].ty))


def FuseResidualNorm() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    return group_pass(_NAME, [GroupRule("residual-norm", NORMS, _match, RESIDUAL_NORM_REGION, worth=_worth)])


PASS = PassInfo(_NAME, FuseResidualNorm, "fuse", REASSOCIATES, doc="Residual sums and norms of them become one.")
