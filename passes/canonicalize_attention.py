"""Recognise scaled dot-product attention, grouped heads and masks included.

    s = R.matmul(q, R.permute_dims(k, [0, 1, 3, 2])); p = R.nn.softmax(s * scale + mask)
    y = R.matmul(p, v)
->  y = attention(q, k, v, mask)  # Composite = "crossloom.attention", body = the lines above

Fires for a scale on the scores, on q, on k or on both; masks that are added or chosen by ``where``; softmax as an
operator, spelled out, or guarded against empty rows; k and v repeated per group (heads 0,0,1,1: grouped); heads
folded into the batch; ``R.nn.attention`` with the transpositions around it.
Never counts tiled heads (0,1,0,1) as grouped: those stay an operand of their own.

Attributes
    ``scale``; ``groups`` (query heads per key head); ``layout``, ``key_layout``, ``value_layout``, ``out_layout``
    (``bhsd``, ``bshd``, ``nsd`` with n = batch * heads; ``bhds``, ``nds``: handed over transposed);
    ``masked``, ``mask_form`` (``add``, ``keep``, ``drop``, ``none``), ``biased`` (a second added operand ``bias``);
    ``mask``: ``none`` (every key is kept), ``causal`` (proved: key j <= query i), ``causal+offset`` (proved:
    j <= i + ``offset``; ``offset`` is a number or ``keys-queries``), ``window`` (proved: of these the last ``window``,
    j > i + ``offset`` - ``window``), ``given`` (whatever the operand holds; where ``bounded``, nothing outside of
    ``offset`` and ``window``);
    ``fill``: the number that ``keep`` and ``drop`` put in place of a score, as text (it may be ``-inf``);
    ``bias_inside``: ``bias`` is added first, so that ``fill`` stands in its place too (else it is added to ``fill``);
    ``empty_rows``: a query without keys gives ``zero``, or whatever ``softmax`` gives.
Numerics: exact; the body is the model's own spelling.  Source: Vaswani et al. 2017; Ainslie et al. 2023.
"""

from __future__ import annotations

import math

from tvm import relax

from crossloom.rewrite import Graph, Match, Rule, Site
from crossloom.verdict import Verdict, refuse

from .matching.attention import grouped, mask_facts, mask_kind, match_spelled
from .matching.heads import transposed
from .matching.lines import distance
from .matching.mask import Band
from .matching.spelling import dims, matched, replay, replayable, sizes

_ATTRIBUTES = ("scale", "groups", "layout", "key_layout", "value_layout", "out_layout")
_MASKS = ("masked", "mask_form", "biased", "mask", "offset", "window", "bounded", "fill", "bias_inside", "empty_rows")
_OPERATORS = frozenset({"relax.nn.attention", "relax.nn.attention_bias"})
_TURN = (0, 2, 1, 3)


def _match_operator(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    call = graph.resolve(root)
    width = (sizes(call.args[0]) or [None])[-1]
    given = call.attrs.scale
    if given is None and width is None:
        return refuse("scale-unknown", root.name, "head size is symbolic and no scale is given")
    if call.attrs.window_size is not None:
        return refuse("attention-windowed", root.name, f"window of {call.attrs.window_size}")
    scale = float(given) if given is not None else 1.0 / math.sqrt(width or 1)
    operands, layouts = {}, {}
    for name, arg in zip(("q", "k", "v"), call.args):
        operands[name], layouts[name] = transposed(graph, arg, {_TURN: "bhsd"}) or (arg, "bshd")
    groups = 1
    if set(layouts.values()) == {"bhsd"}:
        operands["k"], operands["v"], groups = grouped(graph, operands["k"], operands["v"], operands["q"])
    shape = [(dims(arg) or [])[1] for arg in call.args[:2]]
    added = [("add", call.args[3], 0.0)] if len(call.args) > 3 else []
    masks = mask_facts(graph, added, shape, call.args[0])
    if isinstance(masks, Verdict):
        return masks
    captures, facts = masks
    if call.attrs.causal_mask is not None:
        # The operator's own mask is the mask; what is added beside it is a bias.
        offset = 0 if str(call.attrs.causal_mask) == "TopLeft" else distance(*shape)
        kind = mask_kind("given" if offset is None else Band(offset), shape)
        if kind["mask"] == "given":
            return refuse(
                "causal-offset-unknown", root.name, f"{shape[0]} queries, {shape[1]} keys: their distance is not proved"
            )
        captures = {"bias": call.args[3]} if added else {}
        facts |= {"masked": False, "mask_form": "none", "biased": bool(captures), **kind}
    facts |= {"scale": scale, "groups": groups, "layout": layouts["q"], "key_layout": layouts["k"]}
    facts |= {"value_layout": layouts["v"], "out_layout": "bshd", "empty_rows": "softmax"}
    return matched(graph, root, {**operands, **captures}, **facts)


def _match_turned(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    """Match attention whose result is transposed, once or several times in a row."""
    core, axes = root, list(range(4))
    while (call := graph.call(core, "relax.permute_dims")) is not None and len(dims(core) or ()) == 4:
        if (core is not root and graph.uses(core) > 1) or call.attrs.axes is None:
            return None
        axes = [int(call.attrs.axes[a]) % 4 for a in axes]
        core = call.args[0]
        if not isinstance(core, relax.Var):
            return None
    if core.same_as(root) or graph.uses(core) > 1 or tuple(axes) not in (_TURN, tuple(range(4))):
        return None
    if graph.op(core) not in _OPERATORS and graph.op(core) not in ("relax.matmul", "relax.reshape"):
        return None
    users = graph.users.get(root, [])
    if len(users) == 1 and root not in graph.escapes and isinstance(graph.value[users[0]], relax.Call):
        # The last of several transpositions takes them all.
        if graph.op(users[0]) == "relax.permute_dims" and isinstance(_match_turned(graph, users[0]), Match):
            return None
    found = _match_operator(graph, core) if graph.op(core) in _OPERATORS else match_spelled(graph, core)
    # A refusal is told at the core.
    if not isinstance(found, Match) or found.facts["out_layout"] == "nsd":
        return None
    facts = dict(found.facts)
    if tuple(axes) == _TURN:
        facts["out_layout"] = "bhsd" if facts["out_layout"] == "bshd" else "bshd"
    return matched(graph, root, found.captures, **facts)


def _outline(site: Site) -> relax.Expr:
    facts = site.match.facts
    return replay(site, "crossloom.attention", {n: facts[n] for n in (*_ATTRIBUTES, *_MASKS) if n in facts})


def attention_rules() -> list[Rule]:
    """Return the rules, in order of priority: what takes most lines along comes first."""
    return [
        Rule("attention", frozenset({"relax.permute_dims"}), _match_turned, _outline, legal=replayable),
        Rule("attention", _OPERATORS, _match_operator, _outline, legal=replayable),
        Rule("attention", frozenset({"relax.reshape"}), match_spelled, _outline, legal=replayable),
        Rule("attention", frozenset({"relax.matmul"}), match_spelled, _outline, legal=replayable),
    ]
