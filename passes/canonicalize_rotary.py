"""Recognise rotary position embedding by what it computes, not by the order of its lines.

    r = R.concat((R.negative(x[..., h:]), x[..., :h]), -1); y = R.add(x * cos, r * sin)
->  y = rotary(x, cos, sin)       # Composite = "crossloom.rotary", convention = "half-split"

Fires when every output lane is proved to be ``x[a] cos - x[b] sin`` or ``x[b] cos + x[a] sin`` with pairs (a, b)
of a known convention: ``half-split`` (i, i + h) or ``interleaved`` (2i, 2i + 1); lanes behind ``rotary_dim``
may pass through unchanged.
Never for mixed pairs, the opposite direction, scaled lanes, tables read in another lane order, exchanged tables,
or tables proved to turn the lanes of a pair by different angles.

Attributes:

``convention``, ``rotary_dim`` (lanes)
``table``
    ``full``: a table lane per output lane, ``half``: per pair.
``pair_equal``
    Whether both lanes of every pair are proved to read equal cos and equal sin.  False where the tables are given
    (parameters): the composite is right all the same, output lane n reads table lane n; a kernel that keeps one
    table lane a pair may be used only where this is True.
``axes``
    ``1d``: angle = position * frequency, one position a token; ``2d``: two positions a token, each turning some of
    the pairs (row and column); ``mrope``: three (time, height, width); ``given``: not proved, whatever the tables
    hold.  Except for ``given``:
``sections``, ``pair_axis``
    Number of pairs of each axis, and the axis of each pair; axes are numbered as they first appear.
``scale``
    Factor of both tables (1.0 where none).
``inv_freq``, ``theta``
    Frequency of each pair (radians a position) where constant, and its base where ``inv_freq`` is geometric.

Positions read through a table (``take(cos_cache, ids)``) are taken to lie within it.

Numerics: exact; the body is the model's own spelling.  Source: Su et al. 2021; M-RoPE: Wang et al. 2024 (Qwen2-VL).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from tvm import relax

from crossloom.rewrite import Graph, Match, Rule, Site, per_graph
from crossloom.verdict import Verdict

from .matching.angles import table_facts
from .matching.elements import Elements
from .matching.lanes import MOST_NODES, OPERATORS, LaneAlgebra, NotLanes
from .matching.pairs import Rotation, classify
from .matching.products import Product
from .matching.spelling import dims, matched, replay, replayable, same_dims, sizes

#: Facts of tables already read.
_Read: TypeAlias = dict[tuple[Any, ...], "dict[str, Any] | Verdict"]


_JOINS = frozenset({"relax.concat", "relax.reshape"})
_VIEWS = frozenset({"relax.expand_dims", "relax.reshape", "relax.squeeze"})


@per_graph
def _tables(graph: Graph) -> tuple[Elements, _Read]:
    """Return a function's elements, and the facts of its tables, which are put in as they are read."""
    return Elements(weakref.proxy(graph)), {}


def _candidates(graph: Graph, root: relax.Var) -> list[relax.Var]:
    """Return values of the root's shape that it is made of, nearest first; none without two products by tables."""
    shape = dims(root)
    if shape is None or not shape:
        return []
    out: list[relax.Var] = []
    seen: set[relax.Var] = {root}
    products = 0
    stack: list[relax.Var] = [root]
    while stack and len(seen) < MOST_NODES:
        at = stack.pop(0)
        value = graph.value.get(at)
        products += graph.op(at) == "relax.multiply"
        leaves: list[relax.Expr] = []
        if isinstance(value, relax.TupleGetItem):
            leaves = [value.tuple_value]
        elif isinstance(value, relax.Call) and graph.op(at) in OPERATORS:
            leaves = [f for a in value.args for f in (a.fields if isinstance(a, relax.Tuple) else (a,))]
        for leaf in leaves:
            if isinstance(leaf, relax.Var) and leaf not in seen:
                seen.add(leaf)
                if same_dims(dims(leaf) or (), shape):
                    out.append(leaf)
                stack.append(leaf)
    return out if products > 1 else []


def _lanes_of(elements: Elements, table: relax.Expr, tail: tuple[int, ...], lanes: Sequence[int]) -> list[Product]:
    """Return what lanes of a table hold, the axes before left free."""
    lead = len(dims(table) or ()) - len(tail)
    # Counted from the right, so that tables of different rank agree on which axis is which.
    free = tuple(("axis", lead - n) for n in range(lead))
    return [elements.of(table, (*free, *(int(i) for i in np.unravel_index(lane, tail)))) for lane in lanes]


def _facts(graph: Graph, algebra: LaneAlgebra, found: Rotation) -> dict[str, Any] | Verdict:
    """Return what the tables hold; a function's rotations share a few tables, each is read once."""
    elements, read = _tables(graph)
    tables = [(t, algebra.tails[hash(t)], n) for t, n in ((found.cos, found.cos_lanes), (found.sin, found.sin_lanes))]
    key = (found.pairs, *((hash(table), tail, lanes) for table, tail, lanes in tables))
    if key not in read:
        cos, sin = (_lanes_of(elements, *table) for table in tables)
        read[key] = table_facts(elements, cos, sin, found.pairs)
    facts = read[key]
    if isinstance(facts, Verdict):
        return facts
    return {"convention": found.convention, "rotary_dim": found.dim, "table": found.table, **facts}


def _lanes_last(graph: Graph, table: relax.Expr, tail: tuple[int, ...]) -> relax.Expr | None:
    """Return a table, or what it is a view of, whose last axis alone numbers its lanes."""
    shape = dims(table) or []
    wanted = [*shape[: len(shape) - len(tail)], math.prod(tail)]
    while not same_dims(dims(table) or (), wanted):
        value = graph.value.get(table)
        if not isinstance(value, relax.Call) or graph.op(table) not in _VIEWS:
            return None
        table = value.args[0]
    return table


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    shape = sizes(root)
    if not shape or shape[-1] is None:
        return None
    refusal: Verdict | None = None
    for x in _candidates(graph, root):
        # A slice that several rotations share stays outside; tables cut in two are seen whole on the second try.
        for through in (False, True):
            algebra = LaneAlgebra(graph, x, through)
            try:
                found = classify(algebra.of(root), x, shape[-1])
            except NotLanes:
                break
            if found is None:
                break
            facts = found if isinstance(found, Verdict) else _facts(graph, algebra, found)
            if isinstance(facts, dict) and isinstance(found, Rotation):
                cos, sin = (_lanes_last(graph, table, algebra.tails[hash(table)]) for table in (found.cos, found.sin))
                if cos is not None and sin is not None:
                    return matched(graph, root, {"x": x, "cos": cos, "sin": sin}, **facts)
            if isinstance(facts, Verdict):
                refusal = refusal or facts
    return refusal


def _match_join(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    found = _match(graph, root)
    users = set(graph.users.get(root, ()))
    if isinstance(found, Match) and len(users) == 1 and root not in graph.escapes:
        (outer,) = users
        # The join behind puts the lanes that pass through beside these, and the view behind pairs that had an axis of
        # their own into one: it takes all.
        if graph.op(outer) in _JOINS and isinstance(_match(graph, outer), Match):
            return None
    return found


def _outline(site: Site) -> relax.Expr:
    return replay(site, "crossloom.rotary", site.match.facts)


def rotary_rules() -> list[Rule]:
    """Return the rules: joins first, so that a partial rotation takes its unrotated lanes along."""
    return [
        Rule("rotary", _JOINS, _match_join, _outline, legal=replayable),
        Rule("rotary", frozenset({"relax.add", "relax.subtract"}), _match, _outline, legal=replayable),
    ]
