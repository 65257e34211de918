"""Recognise scaled dot-product attention, grouped heads included.

    s = R.matmul(q, R.permute_dims(k, [0, 1, 3, 2])); p = R.nn.softmax(s * scale + mask)
    y = R.matmul(p, v)
->  y = attention(q, k, v, mask)  # Composite = "crossloom.attention", body = the lines above

Fires for a scale on the scores, on q, on k or on both; an additive mask; k and v repeated per group by
``expand_dims, broadcast_to, reshape`` or ``repeat`` (heads 0,0,1,1: grouped); ``R.nn.attention`` as it is.
Never counts tiled heads (0,1,0,1) as grouped: those stay an operand of their own.

Attributes: ``scale``, ``groups`` (query heads per key head), ``layout`` of q and v (``bhsd`` or ``bshd``),
``key_layout`` (also ``bhds``: handed over transposed), ``masked``,
``causal`` (only where the operator says so).  Numerics: exact; the body is the model's own spelling.
Source: Vaswani et al. 2017; Ainslie et al. 2023.
"""

from __future__ import annotations

import math

from tvm import relax

from crossloom.rewrite import Graph, Match, Rule, Site
from crossloom.verdict import Verdict, refuse

from ._match_spelling import dims, either, matched, replay, replayable, same_dims, scalar, sizes


def repeated_heads(graph: Graph, expr: relax.Expr) -> tuple[relax.Expr, int] | None:
    """Return (k, n) where ``expr`` (batch, heads * n, seq, dim) repeats each head of k n times in place."""
    if (call := graph.call(expr, "relax.repeat")) is not None:
        axis = call.attrs.axis
        if axis is not None and int(axis) % 4 == 1 and len(dims(call.args[0]) or ()) == 4:
            return call.args[0], int(call.attrs.repeats)
        return None
    if (outer := graph.call(expr, "relax.reshape")) is None:
        return None
    if (wide := graph.call(outer.args[0], "relax.broadcast_to")) is None:
        return None
    narrow = graph.call(wide.args[0], "relax.expand_dims", "relax.reshape")
    if narrow is None:
        return None
    source = narrow.args[0]
    before, middle, after = dims(source), dims(wide), dims(expr)
    one, thin = sizes(wide.args[0]), dims(wide.args[0])
    if before is None or middle is None or after is None or thin is None or one is None:
        return None
    if len(before) != 4 or len(middle) != 5 or len(after) != 4 or one[2] != 1:
        return None
    # The new axis must stand behind the heads, or reshape would tile instead of repeat.
    kept = same_dims(before, [*thin[:2], *thin[3:]]) and same_dims(before, [*middle[:2], *middle[3:]])
    heads, times, total = sizes(source)[1], sizes(wide)[2], sizes(expr)[1]  # type: ignore[index]
    if not kept or None in (heads, times, total) or heads * times != total:  # type: ignore[operator]
        return None
    if not same_dims([after[0], *after[2:]], [before[0], *before[2:]]):
        return None
    return source, int(times)  # type: ignore[arg-type]


def _unscaled(graph: Graph, expr: relax.Expr) -> tuple[relax.Expr, float]:
    """Return (value, factor) with a scalar factor taken off."""
    if (call := graph.call(expr, "relax.multiply")) is not None:
        for value, factor in either(call):
            number = scalar(graph, factor)
            if number is not None:
                return value, number
    if (call := graph.call(expr, "relax.divide")) is not None:
        number = scalar(graph, call.args[1])
        if number:
            return call.args[0], 1.0 / number
    return expr, 1.0


def _keys(graph: Graph, expr: relax.Expr) -> tuple[relax.Expr, str]:
    """Return (k, layout) of a right operand (batch, heads, dim, seq), before its transposition if it has one."""
    call = graph.call(expr, "relax.permute_dims")
    axes = [int(a) % 4 for a in call.attrs.axes] if call is not None and call.attrs.axes is not None else []
    if call is not None and (not isinstance(expr, relax.Var) or graph.uses(expr) == 1):
        if axes == [0, 1, 3, 2]:
            return call.args[0], "bhsd"
        if axes == [0, 2, 3, 1]:
            return call.args[0], "bshd"
    return expr, "bhds"


def _scores(graph: Graph, expr: relax.Expr) -> tuple[relax.Expr, relax.Expr, str, float] | None:
    """Return (q, k, layout of k, scale) of a scaled product."""
    product, scale = _unscaled(graph, expr)
    call = graph.call(product, "relax.matmul")
    if call is None or len(dims(call.args[0]) or ()) != 4:
        return None
    q, on_q = _unscaled(graph, call.args[0])
    keys, on_keys = _unscaled(graph, call.args[1])
    k, layout = _keys(graph, keys)
    k, on_k = _unscaled(graph, k)
    return q, k, layout, scale * on_q * on_keys * on_k


def _match_spelled(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    call = graph.value[root]
    weights = call.args[0]
    while (cast := graph.call(weights, "relax.astype")) is not None:
        weights = cast.args[0]
    softmax = graph.call(weights, "relax.nn.softmax")
    if softmax is None:
        return None
    rank = len(dims(softmax.args[0]) or ())
    if rank != 4 or int(softmax.attrs.axis) % 4 != 3:
        return refuse("softmax-not-over-keys", getattr(weights, "name", ""), f"rank {rank}")
    inner = softmax.args[0]
    while (cast := graph.call(inner, "relax.astype")) is not None:
        inner = cast.args[0]
    found, mask = _scores(graph, inner), None
    if found is None and (add := graph.call(inner, "relax.add")) is not None:
        for left, right in either(add):
            found = _scores(graph, left)
            # A mask may be broadcast over heads; it may not make the scores wider.
            if found is not None and same_dims(dims(left) or (), dims(inner) or ()):
                mask = right
                break
            found = None
    if found is None:
        return refuse("scores-not-a-scaled-product", getattr(inner, "name", ""))
    q, k, key_layout, scale = found
    v, groups = call.args[1], 1
    on_k, on_v = repeated_heads(graph, k), repeated_heads(graph, v)
    if (
        key_layout == "bhsd"
        and on_k is not None
        and on_v is not None
        and on_k[1] == on_v[1]
        and graph.uses(k) == 1
        and graph.uses(v) == 1
    ):
        (k, groups), v = on_k, on_v[0]
    if not math.isfinite(scale):
        return refuse("scale-not-finite", str(scale))
    captures = {"q": q, "k": k, "v": v, **({} if mask is None else {"mask": mask})}
    facts = {"scale": scale, "groups": groups, "layout": "bhsd", "key_layout": key_layout}
    return matched(graph, root, captures, **facts, masked=mask is not None)


def _match_operator(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    call = graph.value[root]
    width = (sizes(call.args[0]) or [None])[-1]
    given = call.attrs.scale
    if given is None and width is None:
        return refuse("scale-unknown", root.name, "head size is symbolic and no scale is given")
    scale = float(given) if given is not None else 1.0 / math.sqrt(width or 1)
    causal = str(call.attrs.causal_mask or "")
    masked = len(call.args) > 3
    captures = dict(zip(("q", "k", "v", "mask"), call.args, strict=False))
    facts = {"scale": scale, "groups": 1, "layout": "bshd", "key_layout": "bshd"}
    return matched(graph, root, captures, **facts, masked=masked, causal=causal)


def _outline(site: Site) -> relax.Expr:
    facts = site.match.facts
    attrs = {k: facts[k] for k in ("scale", "groups", "layout", "key_layout", "masked")}
    attrs["causal"] = facts.get("causal", "")
    return replay(site, "crossloom.attention", attrs)


def attention_rules() -> list[Rule]:
    """Return the rules, in order of priority."""
    operators = frozenset({"relax.nn.attention", "relax.nn.attention_bias"})
    return [
        Rule("attention", operators, _match_operator, _outline, legal=replayable),
        Rule("attention", frozenset({"relax.matmul"}), _match_spelled, _outline, legal=replayable),
    ]
