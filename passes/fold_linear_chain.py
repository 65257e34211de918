"""Fold linear layers with nothing between them into one.

    h = linear(x, w1, b1); y = linear(h, w2, b2)
->  y = linear(x, w1 @ w2, b1 @ w2 + b2)          # weights alone: computed once when a model is built

Fires where a run takes fewer multiply-accumulates that way (a wide or equal middle).
Never where the middle value is read elsewhere, where the layers together are cheaper apart (a bottleneck, low-rank
weights), nor in half precision unless both weights are constants whose product is known to fit.

Numerics: reassociates.
"""

from __future__ import annotations

import math

import numpy as np
from tvm import relax

from crossloom.rewrite import Graph, Match, Rule, Site, composite_attrs, composite_name
from crossloom.verdict import Verdict, accept, refuse

from .matching.spelling import dtype, is_constant, sizes
from .regions.composites import linear

_LINEAR = "crossloom.linear"
#: What the product of weights may lose by being rounded, relative to its norm: twice float16's own rounding.
_LOST = 2.0**-10


def layer_of(graph: Graph, expr: relax.Expr) -> tuple[dict[str, relax.Expr], str] | None:
    """Return a linear layer's operands and its weight's layout."""
    callee = graph.callee(expr)
    if callee is None or composite_name(callee) != _LINEAR:
        return None
    return graph.operands(expr), str(composite_attrs(callee)["weight_layout"])


def _match(graph: Graph, root: relax.Var) -> Match | None:
    second = layer_of(graph, root)
    between = second[0]["x"] if second is not None else None
    if second is None or not isinstance(between, relax.Var) or between not in graph.value:
        return None
    first = layer_of(graph, between)
    if first is None:
        return None
    captures = {"x": first[0]["x"]}
    for number, (parts, _) in enumerate((first, second), 1):
        captures |= {f"{name}{number}": parts[name] for name in ("weight", "bias") if name in parts}
    facts = {"layouts": (first[1], second[1])}
    return Match(graph, root, captures, frozenset((root, between)), facts)


def _widths(m: Match) -> tuple[int, int, int] | None:
    """Return the layers' widths, from x to the result; None where one is symbolic."""
    ways = [sizes(m[f"weight{i}"]) or [None, None] for i in (1, 2)]
    pairs = [way if layout == "in_out" else way[::-1] for way, layout in zip(ways, m.facts["layouts"])]
    found = (pairs[0][0], pairs[0][1], pairs[1][1])
    return None if None in found else found  # type: ignore[return-value]


def _legal(m: Match) -> Verdict:
    kinds = {dtype(e) for e in m.captures.values()} | {dtype(m.root)}
    if len(kinds) != 1:
        return refuse("different-dtypes", m.root.name, ", ".join(sorted(kinds)))
    if _widths(m) is None:
        return refuse("symbolic-width", m.root.name)
    return _fits_half(m) if kinds <= {"float16", "bfloat16"} else accept()


def _fits_half(m: Match) -> Verdict:
    """Refuse where the product of weights is not known to fit a half-precision type."""
    values = [m.graph.resolve(m[f"weight{i}"]) for i in (1, 2)]
    if not all(map(is_constant, values)) or dtype(m.root) != "float16":
        return refuse("half-precision-weights-unknown", m.root.name, "their product might not fit")
    first, second = (
        value.value.numpy().astype("float64") if layout == "in_out" else value.value.numpy().astype("float64").T
        for value, layout in zip(values, m.facts["layouts"])
    )
    product = first @ second
    if np.abs(product).max(initial=0.0) > np.finfo("float16").max:
        return refuse("product-overflows-half", m.root.name)
    lost = float(np.linalg.norm(product - product.astype("float16").astype("float64")))
    if lost > _LOST * float(np.linalg.norm(product)):
        return refuse("product-loses-half", m.root.name, "too many of its values are too small for the type")
    return accept()


def _worth(m: Match) -> Verdict:
    widths = _widths(m) or (0, 0, 0)
    leads = [d or 1 for d in (sizes(m["x"]) or [1])[:-1]]
    before = math.prod(leads) * (widths[0] * widths[1] + widths[1] * widths[2])
    after = math.prod(leads) * widths[0] * widths[2]
    detail = f"{before} multiply-accumulates apart, {after} as one (symbolic rows count as one)"
    if after >= before:
        return refuse("takes-more-macs", m.root.name, detail, macs=after - before)
    return accept(detail=detail, macs=before - after)


def _replace(site: Site) -> relax.Expr:
    emit, op = site.builder.emit, relax.op
    layouts = site.match.facts["layouts"]
    first, second = (
        site[f"weight{i}"] if layout == "in_out" else emit(op.permute_dims(site[f"weight{i}"], [1, 0]))
        for i, layout in enumerate(layouts, 1)
    )
    weight = emit(op.matmul(first, second))
    _, middle, last = _widths(site.match) or (0, 0, 0)
    bias = None
    if "bias1" in site.match.captures:
        bias = emit(op.reshape(emit(op.matmul(emit(op.reshape(site["bias1"], [1, middle])), second)), [last]))
    if "bias2" in site.match.captures:
        own = emit(op.reshape(site["bias2"], [last]))
        bias = own if bias is None else emit(op.add(bias, own))
    return linear(site, site["x"], weight, bias)


def fold_rules() -> list[Rule]:
    """Return the rules."""
    return [Rule("linear-chain", frozenset({_LINEAR}), _match, _replace, _legal, _worth)]
