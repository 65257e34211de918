"""Recognise rotary position embedding by what it computes, not by the order of its lines.

    r = R.concat((R.negative(x[..., h:]), x[..., :h]), -1); y = R.add(x * cos, r * sin)
->  y = rotary(x, cos, sin)       # Composite = "crossloom.rotary", convention = "half-split"

Fires when every output lane is proved to be ``x[a] cos - x[b] sin`` or ``x[b] cos + x[a] sin`` with pairs (a, b)
of a known convention: ``half-split`` (i, i + h) or ``interleaved`` (2i, 2i + 1); lanes behind ``rotary_dim``
may pass through unchanged.
Never for mixed pairs, the opposite direction, scaled lanes, or tables read in another lane order.

Attributes: ``convention``, ``rotary_dim``, ``table`` (``full``: a table lane per output lane, ``half``: per pair),
``axes`` (``given``: positions are whatever the tables hold: 1-D, 2-D, M-RoPE).

Numerics: exact; the body is the model's own spelling.  Source: Su et al. 2021.
"""

from __future__ import annotations

import numpy as np
from tvm import relax

from crossloom.rewrite import Graph, Match, Rule, Site
from crossloom.verdict import Verdict, refuse

from ._match_lanes import MOST_NODES, LaneAlgebra, NotLanes, Term
from ._match_spelling import dims, matched, replay, replayable, same_dims

_WALKED = frozenset(
    {
        "relax.add",
        "relax.subtract",
        "relax.multiply",
        "relax.negative",
        "relax.astype",
        "relax.strided_slice",
        "relax.split",
        "relax.concat",
        "relax.stack",
        "relax.reshape",
        "relax.expand_dims",
        "relax.squeeze",
    }
)


def _candidates(graph: Graph, root: relax.Var) -> list[relax.Var]:
    """Return values of the root's shape that it is made of, nearest first."""
    shape = dims(root)
    if shape is None or not shape:
        return []
    out: list[relax.Var] = []
    seen: set[relax.Var] = {root}
    stack: list[relax.Var] = [root]
    while stack and len(seen) < MOST_NODES:
        at = stack.pop(0)
        value = graph.value.get(at)
        leaves: list[relax.Expr] = []
        if isinstance(value, relax.TupleGetItem):
            leaves = [value.tuple_value]
        elif isinstance(value, relax.Call) and graph.op(at) in _WALKED:
            leaves = [f for a in value.args for f in (a.fields if isinstance(a, relax.Tuple) else (a,))]
        for leaf in leaves:
            if isinstance(leaf, relax.Var) and leaf not in seen:
                seen.add(leaf)
                if same_dims(dims(leaf) or (), shape):
                    out.append(leaf)
                stack.append(leaf)
    return out


def _lane(terms: list[Term], lane: int) -> list[tuple[float, tuple[tuple[relax.Expr, int], ...]]]:
    return [
        (float(t.coefficient[lane]), tuple((leaf, int(lanes[lane])) for leaf, lanes in t.factors))
        for t in terms
        if t.coefficient[lane] != 0
    ]


def classify(terms: list[Term], x: relax.Var, width: int) -> dict[str, object] | Verdict | None:
    """Return the convention and tables of lanes, a refusal where they rotate in no known way, None for no rotation."""
    partner, sign, cos_lane, sin_lane = ([0] * width for _ in range(4))
    tables: dict[str, relax.Expr] = {}
    rotated = width
    for lane in range(width):
        parts = _lane(terms, lane)
        if len(parts) == 1 and len(parts[0][1]) == 1:
            if parts[0][0] != 1.0 or parts[0][1][0][1] != lane:
                return None
            rotated = min(rotated, lane)
            continue
        if len(parts) != 2 or any(len(p[1]) != 2 or not p[1][0][0].same_as(x) for p in parts):
            return None
        own = [p for p in parts if p[1][0][1] == lane]
        other = [p for p in parts if p[1][0][1] != lane]
        if len(own) != 1 or len(other) != 1:
            return None
        if rotated < lane:
            return refuse("rotated-lanes-not-first", str(lane))
        if own[0][0] != 1.0 or abs(other[0][0]) != 1.0:
            return refuse("lanes-scaled", str(lane))
        for role, part, lanes in (("cos", own[0], cos_lane), ("sin", other[0], sin_lane)):
            table, lanes[lane] = part[1][1]
            if not tables.setdefault(role, table).same_as(table):
                return refuse("several-tables", getattr(table, "name", ""))
        partner[lane], sign[lane] = other[0][1][0][1], int(other[0][0])
    if len(tables) < 2 or rotated % 2 or rotated == 0:
        return None
    half, lanes_ = rotated // 2, np.arange(rotated)
    split = np.where(lanes_ < half, lanes_ + half, lanes_ - half), np.where(lanes_ < half, -1, 1), lanes_ % half
    paired = lanes_ ^ 1, np.where(lanes_ % 2 == 0, -1, 1), lanes_ // 2
    for convention, (mate, turn, pair) in (("half-split", split), ("interleaved", paired)):
        if not np.array_equal(partner[:rotated], mate):
            continue
        if np.array_equal(sign[:rotated], -turn):
            return refuse("rotates-backwards", x.name)
        if not np.array_equal(sign[:rotated], turn):
            return refuse("not-a-rotation", x.name)
        for kind, want in (("full", lanes_), ("half", pair)):
            if np.array_equal(cos_lane[:rotated], want) and np.array_equal(sin_lane[:rotated], want):
                return {"convention": convention, "rotary_dim": rotated, "table": kind, **tables}
        return refuse("table-lanes-in-another-order", getattr(tables["cos"], "name", ""))
    return refuse("unknown-convention", x.name)


def _made_by(graph: Graph, table: relax.Expr, wrong: str) -> bool:
    """Return whether a table is plainly the values of the function it must not be."""
    views = ("astype", "expand_dims", "reshape", "squeeze", "concat", "multiply", "permute_dims", "strided_slice")
    for _ in range(MOST_NODES):
        if graph.op(table) == wrong:
            return True
        call = graph.call(table, *(f"relax.{v}" for v in views))
        if call is None:
            return False
        table = call.args[0].fields[0] if isinstance(call.args[0], relax.Tuple) else call.args[0]
    return False


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    refusal: Verdict | None = None
    # A slice that several rotations share stays outside; tables cut in two are seen whole on the second try.
    for x, through in ((x, t) for x in _candidates(graph, root) for t in (False, True)):
        width = (dims(root) or [0])[-1]
        try:
            terms = LaneAlgebra(graph, x, through).of(root)
            found = classify(terms, x, int(width))
        except (NotLanes, TypeError):
            continue
        if isinstance(found, Verdict):
            refusal = refusal or found
        elif found is not None:
            cos, sin = found.pop("cos"), found.pop("sin")
            if _made_by(graph, cos, "relax.sin") or _made_by(graph, sin, "relax.cos"):
                return refuse("tables-exchanged", x.name)
            return matched(graph, root, {"x": x, "cos": cos, "sin": sin}, **found)
    return refusal


def _outline(site: Site) -> relax.Expr:
    facts = site.match.facts
    attrs = {key: facts[key] for key in ("convention", "rotary_dim", "table")}
    return replay(site, "crossloom.rotary", {**attrs, "axes": "given"})


def rotary_rules() -> list[Rule]:
    """Return the rules: joins first, so that a partial rotation takes its unrotated lanes along."""
    return [
        Rule("rotary", frozenset({"relax.concat", "relax.reshape"}), _match, _outline, legal=replayable),
        Rule("rotary", frozenset({"relax.add", "relax.subtract"}), _match, _outline, legal=replayable),
    ]
