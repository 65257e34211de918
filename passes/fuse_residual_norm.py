"""Sum and norm rows in one pass over memory.

    s = R.add(x, r); n = rms_norm(s, g)
->  s, n = fused_residual_norm(x, r, g)           # n alone where nothing else reads s
    n = layer_norm(x, g, b)
->  n = fused_residual_norm(x, g, b)              # a norm that found neither a sum nor a linear layer

Fires for a sum of two values and all RMS and layer norms over the last axis that read it in its block: the sum is a
result too where it is read again (pre-norm residual streams), or is never written (post-norm, as in BERT).  Operands
may be stretched (position embeddings), norms with or without weight and bias, rows of any number.  All norms of a value
that is no such sum become one region too: it is read once, by one kernel, however they are spelled.
Never where the row's length or how operands fit together is unknown, nor for norms over several axes or in types that
are neither x's nor float32: these stay as they are.

Numerics: reassociates (float16 sums are rounded as before, statistics are float32).  Linear in the module's size.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, GroupRule, Match, group_pass, root_name
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


def _is_norm_of(graph: Graph, var: relax.Var, values: Sequence[relax.Expr]) -> bool:
    return root_name(graph, var) in NORMS and any(graph.value[var].args[0].same_as(value) for value in values)


def _group(graph: Graph, root: relax.Var, names: list[relax.Var], values: list[relax.Var]) -> Match | Verdict | None:
    """Return all norms of a value that has several names, together with the bindings ``names``."""
    if not (verdict := _takes(graph, names, root)).fired:
        return verdict
    readers = dict.fromkeys(reader for value in values for reader in graph.users.get(value, ()))
    norms = [v for v in readers if graph.block.get(v) == graph.block.get(root) and _is_norm_of(graph, v, values)]
    norms = sorted((v for v in norms if _takes(graph, names, v).fired), key=graph.position.__getitem__)
    if not norms[0].same_as(root):
        return None  # The group is found at its first norm.
    members = frozenset((*names, *(v for norm in norms for v in _with_cast(graph, norm))))
    return Match(graph, root, {}, members, {"names": names, "norms": len(norms)})


def _match_sum(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    names = _names(graph, graph.value[root].args[0])
    if not names or graph.call(names[-1], "relax.add") is None:
        return None
    return _group(graph, root, names, names)


def _match_value(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    x = graph.value[root].args[0]
    return _group(graph, root, [], [x]) if isinstance(x, relax.Var) else None


def _worth(m: Match) -> Verdict:
    """Return what is saved: no norm but the first reads the value from memory; and where it is a sum that stands here,
    not the first either, and it is written only where something else reads it.
    """
    graph, names = m.graph, m.facts["names"]
    if not names:
        return accept(bytes_saved=(m.facts["norms"] - 1) * bytes_of(graph.value[m.root].args[0].ty))
    outside = (u for name in names for u in graph.users.get(name, ()) if u not in m.interior)
    kept = any(name in graph.escapes for name in names) or next(outside, None) is not None
    return accept(bytes_saved=(m.facts["norms"] + (not kept)) * bytes_of(names[-1].ty))


def FuseResidualNorm() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    rules = (("residual-norm", _match_sum), ("norm", _match_value))
    return group_pass(
        _NAME, [GroupRule(name, NORMS, match, RESIDUAL_NORM_REGION, worth=_worth) for name, match in rules]
    )


PASS = PassInfo(_NAME, FuseResidualNorm, "fuse", REASSOCIATES, doc="Residual sums and norms of them become one.")
