"""Attend to all windows of a sequence at once.

    q1, q2 = R.split(q, 2, axis=2); k1, k2 = ...; v1, v2 = ...
    y = R.concat((attention(q1, k1, v1), attention(q2, k2, v2)), axis=1)
->  y = R.reshape(attention(windows(q), windows(k), windows(v)), ...)   # windows: (1, h, n * w, d) -> (n, h, w, d)

Fires for two or more attention composites of one kind and size, whose operands are the parts, in order, of three
splits along the sequence and whose results are joined along it in the same order: a vision tower whose layers look at
windows, as Qwen2.5-VL's does.
Never for masked attention, for windows of different sizes, for a batch of more than one sequence, nor where a part is
read elsewhere.

Numerics: reassociates (each window is computed as before, by a kernel of another shape).  Linear in the module's size.
"""

from __future__ import annotations

import tvm
from tvm import relax

from crossloom.numerics import REASSOCIATES
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, Match, Rule, Site, composite_attrs, composite_name, outline, rewrite_pass, splice
from crossloom.rewrite.composite import Attr
from crossloom.rewrite.sizes import sizes_in
from crossloom.verdict import Verdict, accept, refuse

from .matching.spelling import fields_of, interior, sizes

_NAME = "batch-attention-windows"
_ATTENTION = "crossloom.attention"
_OPERANDS = ("q", "k", "v")
#: Batch, heads, sequence, lanes of the operands; the results have heads behind the sequence.
_LAYOUTS = {"layout": "bhsd", "key_layout": "bhsd", "value_layout": "bhsd", "out_layout": "bshd"}


def _attention(graph: Graph, expr: relax.Expr) -> relax.Call | None:
    callee, call = graph.callee(expr), graph.resolve(expr)
    named = callee is not None and composite_name(callee) == _ATTENTION
    return call if named and isinstance(call, relax.Call) else None


def _whole(graph: Graph, parts: list[relax.Expr]) -> relax.Expr | None:
    """Return the value whose parts along the sequence these are, all and in order."""
    source: relax.Expr | None = None
    for number, part in enumerate(parts):
        item = graph.resolve(part)
        if not isinstance(item, relax.TupleGetItem) or int(item.index) != number:
            return None
        if source is not None and not item.tuple_value.same_as(source):
            return None
        source = item.tuple_value
    cut = graph.call(source, "relax.split") if source is not None else None
    if cut is None or int(cut.attrs.axis) % 4 != 2 or len(source.ty.fields) != len(parts):  # type: ignore[union-attr]
        return None
    return cut.args[0]


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    join = graph.resolve(root)
    parts = fields_of(graph, join.args[0])
    calls = [call for part in parts if (call := _attention(graph, part)) is not None]
    if len(calls) < 2 or len(calls) != len(parts) or int(join.attrs.axis) % 4 != 1:
        return None
    if any(len(call.args) != len(_OPERANDS) for call in calls):
        return None
    operands = {name: _whole(graph, [call.args[i] for call in calls]) for i, name in enumerate(_OPERANDS)}
    if any(value is None for value in operands.values()):
        return None
    captures = {name: value for name, value in operands.items() if value is not None}
    inside = interior(graph, root, list(captures.values()))
    return Match(graph, root, captures, inside, {"call": calls[0], "calls": calls})


def _legal(m: Match) -> Verdict:
    call: relax.Call = m.facts["call"]
    callee = m.graph.mod[call.op]
    facts = composite_attrs(callee)
    if any(not other.op.same_as(call.op) for other in m.facts["calls"]):
        return refuse("windows-differ", m.root.name, "windows of several sizes, or attended to in several ways")
    if any(str(facts[key]) != layout for key, layout in _LAYOUTS.items()):
        return refuse("layout-of-windows", m.root.name, ", ".join(str(facts[key]) for key in _LAYOUTS))
    if any((sizes(m[name]) or [None])[0] != 1 for name in _OPERANDS):
        return refuse("several-sequences", m.root.name, "windows would be told apart from sequences no more")
    if any(None in (sizes(arg) or [None]) for arg in call.args):
        return refuse("windows-of-unknown-size", m.root.name)
    inner = Graph("attention", callee, m.graph.mod)
    if any(True for var in inner.order for _ in sizes_in(inner.leaves[var])):
        return refuse("body-of-fixed-size", m.root.name, "the attention's own lines name the size of a window")
    return accept(detail=f"{len(m.facts['calls'])} windows")


def _replace(site: Site) -> relax.Expr:
    match = site.match
    call: relax.Call = match.facts["call"]
    callee = match.graph.mod[call.op]
    emit, count = site.builder.emit, len(match.facts["calls"])
    windows = {}
    for name, part in zip(_OPERANDS, call.args):
        _, heads, rows, lanes = sizes(part) or []
        apart = emit(relax.op.reshape(site[name], [1, heads, count, rows, lanes]))
        turned = emit(relax.op.permute_dims(apart, [0, 2, 1, 3, 4]))
        windows[name] = emit(relax.op.reshape(turned, [count, heads, rows, lanes]))
    facts: dict[str, Attr] = dict(composite_attrs(callee))  # type: ignore[arg-type]

    def body(builder: relax.BlockBuilder, **params: relax.Var) -> relax.Expr:
        return splice(builder, callee, list(params.values()))

    mixed = emit(outline(site, _ATTENTION, windows, body, facts))
    return relax.op.reshape(mixed, match.root.ty.shape)


def BatchAttentionWindows() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    return rewrite_pass(_NAME, [Rule("attention-windows", frozenset({"relax.concat"}), _match, _replace, legal=_legal)])


PASS = PassInfo(_NAME, BatchAttentionWindows, "canonicalize", REASSOCIATES, doc="Windows are attended to all at once.")
