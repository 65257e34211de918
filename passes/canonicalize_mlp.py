"""Recognise whole feed-forward blocks: gated (SwiGLU, GeGLU, ReGLU) and plain.

    g = linear(x, gate); u = linear(x, up); y = linear(act(g) * u, down)
->  y = gated_mlp(x, gate, up, down)    # Composite = "crossloom.gated_mlp", activation = "silu"

Fires when gate and up are linear layers of one value, the activation stands on exactly one of them and nothing
inside is read elsewhere, or when both are the halves of one linear layer's result; ``linear(act(linear(x, up)),
down)`` becomes ``crossloom.mlp``.
Never when both sides of the product are activated (which is the gate is not known).  Where it does not fire, the
linear layers and activations inside become composites of their own.

Attributes: ``activation``; ``gate_layout``, ``up_layout``, ``down_layout`` as of ``crossloom.linear``; ``packed``:
``""``, or ``gate-up`` / ``up-gate`` where one operand ``packed`` (layout ``packed_layout``) holds both in that order.
Numerics: exact; the body is the model's own spelling.  Source: Shazeer 2020.
"""

from __future__ import annotations

from tvm import relax

from crossloom.rewrite import Graph, Match, Rule, Site
from crossloom.verdict import Verdict, refuse

from .canonicalize_activation import ROOTS, match_activation
from .canonicalize_linear import match_linear
from .matching.spelling import dims, either, matched, replay, replayable, same_dims


def _activated(graph: Graph, expr: relax.Expr) -> tuple[relax.Expr, str] | None:
    """Return (value, kind) where ``expr`` is an activation of a value."""
    if not isinstance(expr, relax.Var) or expr not in graph.value:
        return None
    if (relu := graph.call(expr, "relax.nn.relu")) is not None:
        return relu.args[0], "relu"
    found = match_activation(graph, expr) if graph.op(expr) in ROOTS else None
    return (found["x"], str(found.facts["kind"])) if isinstance(found, Match) else None


def _linear(graph: Graph, expr: relax.Expr) -> Match | None:
    found = match_linear(graph, expr) if isinstance(expr, relax.Var) and expr in graph.value else None
    return found if isinstance(found, Match) else None


def _parts(name: str, layer: Match) -> dict[str, relax.Expr]:
    bias = {f"{name}_bias": layer["bias"]} if "bias" in layer.captures else {}
    return {name: layer["weight"], **bias}


def _half(graph: Graph, expr: relax.Expr) -> tuple[relax.Expr, int] | None:
    """Return (value, 0 or 1) where ``expr`` is that half of a value, cut in two along its last axis."""
    item = graph.resolve(expr)
    if not isinstance(item, relax.TupleGetItem) or (cut := graph.call(item.tuple_value, "relax.split")) is None:
        return None
    parts, rank = list(cut.ty.fields), len(dims(cut.args[0]) or ())
    halves = [list(part.shape) for part in parts if part.shape is not None]
    if int(cut.attrs.axis) % rank != rank - 1 or len(parts) != 2 or len(halves) != 2:
        return None
    return (cut.args[0], int(item.index)) if same_dims(halves[0], halves[1]) else None


def _packed(graph: Graph, gate: relax.Expr, up: relax.Expr) -> tuple[Match, str] | None:
    """Return (layer, order) where gate and up are the two halves of one linear layer's result."""
    first, second = _half(graph, gate), _half(graph, up)
    if first is None or second is None or not first[0].same_as(second[0]) or first[1] == second[1]:
        return None
    layer = _linear(graph, first[0])
    return None if layer is None else (layer, "gate-up" if first[1] == 0 else "up-gate")


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    down = _linear(graph, root)
    if down is None:
        return None
    inner = down["x"]
    if (plain := _activated(graph, inner)) is not None:
        up = _linear(graph, plain[0])
        if up is None:
            return None
        layouts = {"up_layout": up.facts["weight_layout"], "down_layout": down.facts["weight_layout"]}
        captures = {"x": up["x"], **_parts("up", up), **_parts("down", down)}
        return matched(graph, root, captures, composite="crossloom.mlp", attrs={"activation": plain[1], **layouts})
    product = graph.call(inner, "relax.multiply")
    if product is None:
        return None
    sides = [(act, other) for gate, other in either(product) if (act := _activated(graph, gate)) is not None]
    if len(sides) == 2:
        return refuse("gate-ambiguous", getattr(inner, "name", ""), "both factors are activated")
    if not sides:
        return None
    (value, kind), other = sides[0]
    if (both := _packed(graph, value, other)) is not None:
        layer, order = both
        captures = {"x": layer["x"], **_parts("packed", layer), **_parts("down", down)}
        attrs = {"activation": kind, "packed": order, "packed_layout": layer.facts["weight_layout"]}
        attrs["down_layout"] = down.facts["weight_layout"]
        return matched(graph, root, captures, composite="crossloom.gated_mlp", attrs=attrs)
    gate, up = _linear(graph, value), _linear(graph, other)
    if gate is None or up is None:
        return None
    if not gate["x"].same_as(up["x"]):
        return refuse("gate-and-up-read-different-values", getattr(up["x"], "name", ""))
    if not same_dims(dims(value) or (), dims(other) or ()):
        return refuse("gate-and-up-differ-in-shape", getattr(value, "name", ""), "one is stretched over the other")
    layers = {"gate": gate, "up": up, "down": down}
    captures = {"x": gate["x"]}
    for name, layer in layers.items():
        captures |= _parts(name, layer)
    attrs = {"activation": kind, "packed": "", **{f"{n}_layout": m.facts["weight_layout"] for n, m in layers.items()}}
    return matched(graph, root, captures, composite="crossloom.gated_mlp", attrs=attrs)


def _outline(site: Site) -> relax.Expr:
    facts = site.match.facts
    return replay(site, facts["composite"], facts["attrs"])


def mlp_rules() -> list[Rule]:
    """Return the rules; views around a sum come before it, and sums (a bias) before bare products."""
    return [
        Rule("mlp", frozenset({"relax.reshape"}), _match, _outline, legal=replayable),
        Rule("mlp", frozenset({"relax.add"}), _match, _outline, legal=replayable),
        Rule("mlp", frozenset({"relax.matmul"}), _match, _outline, legal=replayable),
    ]
