"""Recognise RMSNorm and LayerNorm, as one operator or spelled out.

    s = R.mean(R.power(x, 2), axis=[-1], keepdims=True); r = R.rsqrt(s + eps); y = w * (x * r)
->  y = rms_norm(x, w)            # Composite = "crossloom.rms_norm", body = the lines above

Fires for power/multiply/square squares, rsqrt, 1/sqrt, power(-0.5) and division by sqrt, casts around the
core, any set of trailing axes.
Never when the mean is taken of another value than the one that is scaled, or an inner value is read elsewhere.

Numerics: exact; the body is the model's own spelling.  Source: Zhang & Sennrich 2019; Ba et al. 2016.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax

from crossloom.rewrite import Graph, Match, Rule, Site
from crossloom.verdict import Verdict, refuse

from ._match_spelling import dims, either, matched, replay, replayable, same_dims, scalar, uncast


def _squared(graph: Graph, expr: relax.Expr) -> relax.Expr | None:
    """Return x where ``expr`` is x squared."""
    if (call := graph.call(expr, "relax.multiply")) is not None:
        return call.args[0] if call.args[0].same_as(call.args[1]) else None
    if (call := graph.call(expr, "relax.square")) is not None:
        return call.args[0]
    call = graph.call(expr, "relax.power")
    return call.args[0] if call is not None and scalar(graph, call.args[1]) == 2.0 else None


def _inverse_root(graph: Graph, expr: relax.Expr) -> relax.Expr | None:
    """Return v where ``expr`` is v to the power -1/2."""
    expr = uncast(graph, expr)
    if (call := graph.call(expr, "relax.rsqrt")) is not None:
        return call.args[0]
    if (call := graph.call(expr, "relax.divide")) is not None and scalar(graph, call.args[0]) == 1.0:
        return _root(graph, call.args[1])
    call = graph.call(expr, "relax.power")
    return call.args[0] if call is not None and scalar(graph, call.args[1]) == -0.5 else None


def _root(graph: Graph, expr: relax.Expr) -> relax.Expr | None:
    """Return v where ``expr`` is v to the power 1/2."""
    if (call := graph.call(expr, "relax.sqrt")) is not None:
        return call.args[0]
    call = graph.call(expr, "relax.power")
    return call.args[0] if call is not None and scalar(graph, call.args[1]) == 0.5 else None


def _scaled(graph: Graph, expr: relax.Expr) -> tuple[relax.Expr, relax.Expr, float] | None:
    """Return (x, mean, eps) where ``expr`` is ``x / sqrt(mean + eps)``."""
    pairs: list[tuple[relax.Expr, relax.Expr]] = []
    if (call := graph.call(expr, "relax.multiply")) is not None:
        pairs = [(x, v) for x, r in either(call) if (v := _inverse_root(graph, r)) is not None]
    elif (call := graph.call(expr, "relax.divide")) is not None and scalar(graph, call.args[0]) is None:
        v = _root(graph, uncast(graph, call.args[1]))
        pairs = [(call.args[0], v)] if v is not None else []
    for x, v in pairs:
        if (add := graph.call(v, "relax.add")) is not None:
            for mean, eps in either(add):
                value = scalar(graph, eps)
                if value is not None:
                    return x, mean, value
    return None


def _trailing(x: relax.Expr, axes: list[int]) -> list[int] | None:
    """Return negative axes when they are the last ones."""
    shape = dims(x)
    if shape is None:
        return None
    negative = sorted(a - len(shape) if a >= 0 else a for a in axes)
    return negative if negative == list(range(-len(negative), 0)) else None


def _mean(graph: Graph, expr: relax.Expr, *ops: str) -> tuple[relax.Expr, list[int]] | None:
    call = graph.call(expr, *(ops or ("relax.mean",)))
    if call is None or call.attrs.axis is None or not call.attrs.keepdims:
        return None
    axes = _trailing(call.args[0], [int(a) for a in call.attrs.axis])
    return None if axes is None else (call.args[0], axes)


def _fits(x: relax.Expr, weight: relax.Expr, axes: list[int]) -> bool:
    """Return whether the weight spans the normalised axes, leading ones of size 1 aside."""
    shape, wide = dims(weight), dims(x)
    if shape is None or wide is None:
        return False
    while len(shape) > len(axes) and isinstance(int_or_none(shape[0]), int) and int_or_none(shape[0]) == 1:
        shape = shape[1:]
    return same_dims(shape, wide[-len(axes) :])


def int_or_none(dim: object) -> int | None:
    """Return a static dimension."""
    try:
        return int(dim)  # type: ignore[call-overload]
    except TypeError:
        return None


def _match_rms(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    call = graph.value[root]
    for core, weight in either(call):
        found = _scaled(graph, uncast(graph, core))
        if found is None or (squares := _mean(graph, found[1])) is None:
            continue
        x, (inner, axes), eps = found[0], squares, found[2]
        source = _squared(graph, inner)
        if source is None:
            continue
        given = x
        if not source.same_as(x):
            # The statistics may be taken from a widened copy of x.
            if not uncast(graph, source).same_as(uncast(graph, x)):
                return refuse("mean-of-another-value", getattr(source, "name", ""))
        given = uncast(graph, x) if graph.call(x, "relax.astype") is not None else x
        if graph.call(given, "relax.subtract") is not None and _match_centred(graph, given) is not None:
            return None
        if not _fits(x, weight, axes):
            return refuse("weight-does-not-span-axes", getattr(weight, "name", ""))
        return matched(graph, root, {"x": given, "weight": weight}, axes=axes, epsilon=eps)
    return None


def _match_centred(graph: Graph, expr: relax.Expr) -> tuple[relax.Expr, list[int]] | None:
    """Return (x, axes) where ``expr`` is ``x - mean(x)``."""
    call = graph.call(expr, "relax.subtract")
    if call is None or (mean := _mean(graph, call.args[1])) is None or not mean[0].same_as(call.args[0]):
        return None
    return mean


def _layer_core(graph: Graph, expr: relax.Expr) -> tuple[relax.Expr, list[int], float] | None:
    found = _scaled(graph, uncast(graph, expr))
    if found is None or (centred := _match_centred(graph, found[0])) is None:
        return None
    if (direct := _mean(graph, found[1], "relax.variance")) is not None:
        source, axes = direct
        if not source.same_as(centred[0]):
            return None
    else:
        squares = _mean(graph, found[1])
        source_of = None if squares is None else _squared(graph, squares[0])
        if squares is None or source_of is None:
            return None
        # The squares are of the same difference, or of one computed a second time.
        again = centred if source_of.same_as(found[0]) else _match_centred(graph, source_of)
        if again is None or not again[0].same_as(centred[0]):
            return None
        axes = squares[1]
    return (uncast(graph, centred[0]), axes, found[2]) if axes == centred[1] else None


def _match_layer(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    call = graph.value[root]
    sums = either(call) if graph.op(root) == "relax.add" else iter([(root, None)])
    for product, bias in sums:
        product = uncast(graph, product) if bias is not None else product
        scaled = graph.call(product, "relax.multiply")
        for core, weight in either(scaled) if scaled is not None else ():
            found = _layer_core(graph, core)
            if found is None:
                continue
            x, axes, eps = found
            if not _fits(x, weight, axes) or (bias is not None and not _fits(x, bias, axes)):
                return None
            captures = {"x": x, "weight": weight, **({} if bias is None else {"bias": bias})}
            return matched(graph, root, captures, axes=axes, epsilon=eps)
    return None


def _match_operator(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    call = graph.value[root]
    axes = _trailing(call.args[0], [int(a) for a in call.attrs.axes])
    if axes is None:
        return refuse("axes-not-trailing", str(list(call.attrs.axes)))
    names = ("x", "weight", "bias")
    return matched(graph, root, dict(zip(names, call.args, strict=False)), axes=axes, epsilon=float(call.attrs.epsilon))


def _outline(name: str) -> Callable[[Site], relax.Expr]:
    def replace(site: Site) -> relax.Expr:
        facts = site.match.facts
        return replay(site, name, {"axes": facts["axes"], "epsilon": facts["epsilon"]})

    return replace


def norm_rules() -> list[Rule]:
    """Return the rules, in order of priority."""
    layer, rms = _outline("crossloom.layer_norm"), _outline("crossloom.rms_norm")
    return [
        Rule("layer-norm", frozenset({"relax.nn.layer_norm"}), _match_operator, layer, legal=replayable),
        Rule("rms-norm", frozenset({"relax.nn.rms_norm"}), _match_operator, rms, legal=replayable),
        Rule("layer-norm", frozenset({"relax.add"}), _match_layer, layer, legal=replayable),
        Rule("layer-norm", frozenset({"relax.multiply"}), _match_layer, layer, legal=replayable),
        Rule("rms-norm", frozenset({"relax.multiply"}), _match_rms, rms, legal=replayable),
    ]
