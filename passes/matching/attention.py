"""Read attention that is spelled out: scores, masks, softmax, values; see ``canonicalize_attention``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import relax, tirx

from crossloom.rewrite import Graph, Match
from crossloom.verdict import Verdict, refuse

from .heads import Product, filled, operand, product_of, repeated_heads, through
from .lines import proved
from .mask import Band, is_minus_infinity, kept, kept_within
from .softmax import Weights, softmax_of
from .spelling import dims, dtype, either, matched, same_dims, sizes

#: How it is applied, the operand, and what it puts in place of a score (0 for one that is added).
Mask = tuple[str, relax.Expr, float]


@dataclass(frozen=True)
class _Scores:
    """A product, its masks as (form, operand, fill), innermost first, and its (queries, keys)."""

    product: Product
    shape: Sequence[tirx.Expr]
    masks: tuple[Mask, ...] = ()


def _scores(graph: Graph, expr: relax.Expr, regroup: bool, depth: int = 3) -> _Scores | None:
    """Return the product under masks."""
    expr = through(graph, expr, regroup=True)
    if (product := product_of(graph, expr, regroup)) is not None:
        return _Scores(product, (dims(expr) or [])[-2:])
    options: list[tuple[relax.Expr, Mask]] = []
    if (add := graph.call(expr, "relax.add")) is not None:
        options = [(inner, ("add", mask, 0.0)) for inner, mask in either(add)]
    elif (where := graph.call(expr, "relax.where")) is not None:
        for inner, fill, form in ((where.args[1], where.args[2], "keep"), (where.args[2], where.args[1], "drop")):
            number = filled(graph, fill)
            if number is not None:
                options.append((inner, (form, where.args[0], number)))
    for inner, mask in options if depth else ():
        # A mask may be broadcast over heads; it may not make the scores wider.
        if same_dims(dims(inner) or (), dims(expr) or (None,)):
            found = _scores(graph, inner, regroup, depth - 1)
            if found is not None:
                return replace(found, masks=(*found.masks, mask))
    return None


def mask_kind(band: Band | str, shape: Sequence[tirx.Expr]) -> dict[str, object]:
    """Return the facts of the keys a mask keeps; shape is (queries, keys)."""
    given: dict[str, object] = {"mask": "given", "offset": "0"}
    if isinstance(band, str):
        return given | {"mask": band}
    difference = shape[1] - shape[0]
    if isinstance(band.offset, (int, tirx.IntImm)):
        offset = str(int(band.offset))
    elif proved(band.offset >= difference) and proved(difference >= band.offset):
        offset = "keys-queries"
    else:
        return given
    if band.window is not None:
        return {"mask": "window", "offset": offset, "window": band.window}
    return {"mask": "causal" if offset == "0" else "causal+offset", "offset": offset}


def mask_facts(
    graph: Graph, masks: Sequence[Mask], shape: Sequence[tirx.Expr], scores: relax.Expr
) -> tuple[dict[str, relax.Expr], dict[str, object]] | Verdict:
    """Return (captures, facts) of up to two masks (innermost first), of which one at most is no sum."""
    ranked = []
    for form, mask, fill in masks:
        kind = mask_kind(kept(graph, mask, shape, form), shape)
        if form != "add" and kind["mask"] != "none" and not is_minus_infinity(fill, dtype(scores)):
            kind = {"mask": "given", "offset": "0"}
        if kind["mask"] == "given" and form == "keep" and fill == -math.inf:
            within = mask_kind(kept_within(graph, mask, shape) or "given", shape)
            kind = kind if within["mask"] == "given" else {**within, "mask": "given", "bounded": True}
        ranked.append(((form == "add", kind["mask"] == "given"), form, mask, kind, "" if form == "add" else str(fill)))
    ranked.sort(key=lambda r: r[0])
    if len(ranked) > 2 or (len(ranked) == 2 and ranked[1][1] != "add"):
        return refuse("several-masks", getattr(masks[0][1], "name", ""), f"{len(ranked)} operands mask the scores")
    if not ranked:
        facts = {"masked": False, "mask_form": "none", "biased": False, "mask": "none", "offset": "0", "fill": ""}
        return {}, {**facts, "bias_inside": False}
    _, form, mask, kind, filled = ranked[0]
    captures = {"mask": mask, **({"bias": ranked[1][2]} if len(ranked) == 2 else {})}
    facts = {
        "masked": True,
        "mask_form": form,
        "biased": len(ranked) == 2,
        **kind,
        "fill": filled,
        "bias_inside": len(masks) == 2 and [f == "add" for f, _, _ in masks] == [True, False],
    }
    return captures, facts


def _leads(expr: relax.Expr, layout: str = "") -> list[tirx.Expr]:
    """Return batch and heads."""
    shape = dims(expr) or []
    return [shape[0], shape[2]] if layout == "bshd" else shape[:-2]


def grouped(graph: Graph, k: relax.Expr, v: relax.Expr, q: relax.Expr) -> tuple[relax.Expr, relax.Expr, int]:
    """Return (k, v, groups) with repeated heads taken back."""
    on_k, on_v = repeated_heads(graph, k), repeated_heads(graph, v)
    if on_k and on_v and on_k[1] == on_v[1] and graph.uses(k) == 1 and graph.uses(v) == 1:
        return on_k[0], on_v[0], on_k[1]
    heads = [(sizes(x) or [None, None])[1] for x in (q, k, v)]
    # One key head for all: the product broadcasts it.
    shared = heads[0] is not None and heads[1] == 1 and heads[2] == 1
    return k, v, int(heads[0] or 1) if shared else 1


def match_spelled(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    """Match at the product with v, or at the view that tells its heads apart."""
    product, apart = root, graph.op(root) == "relax.reshape"
    if apart:
        product = graph.resolve(root).args[0]
        if len(dims(root) or ()) != 4 or len(dims(product) or ()) != 3 or graph.op(product) != "relax.matmul":
            return None
        if not same_dims((dims(root) or [])[2:], (dims(product) or [])[1:]):
            return None
    call = graph.resolve(product)
    weights = softmax_of(graph, through(graph, call.args[0], regroup=True))
    if not isinstance(weights, Weights):
        return weights
    for regroup in (True, False):
        found = _scores(graph, weights.scores, regroup)
        if found is None:
            return refuse("scores-not-a-scaled-product", getattr(weights.scores, "name", ""))
        q, k, key_layout, scale = (getattr(found.product, n) for n in ("q", "k", "key_layout", "scale"))
        v, factor = operand(graph, call.args[1], regroup)
        if factor != 1.0:
            v = call.args[1]
        ranks = {len(dims(x) or ()) for x in (q, k, v)}
        folded = len(dims(product) or ()) == 3 and ranks == {4}
        # Heads folded into the batch have to be folded alike.
        if len(ranks) == 1 and (not folded or same_dims(_leads(q), _leads(v))):
            break
    else:
        return refuse("operands-of-different-rank", root.name)
    if apart and not (folded and same_dims(_leads(root), _leads(q))):
        return None
    if folded and not same_dims(_leads(q), _leads(k, key_layout)):
        return refuse("heads-folded-differently", getattr(k, "name", ""))
    if not math.isfinite(scale):
        return refuse("scale-not-finite", str(scale))
    rank, groups = ranks.pop(), 1
    if key_layout == "bhsd":
        k, v, groups = grouped(graph, k, v, q)
    masks = mask_facts(graph, found.masks, found.shape, found.product.q)
    if isinstance(masks, Verdict):
        return masks
    layout = "bhsd" if rank == 4 else "nsd"
    out_layout = "nsd" if len(dims(root) or ()) == 3 else "bhsd"
    facts = {"scale": scale, "groups": groups, "layout": layout, "key_layout": key_layout, "value_layout": layout}
    facts |= {"out_layout": out_layout, "empty_rows": weights.empty_rows, **masks[1]}
    return matched(graph, root, {"q": q, "k": k, "v": v, **masks[0]}, **facts)
