"""Recognise RMSNorm and LayerNorm, as one operator or spelled out, with or without weight and bias.

    s = R.mean(R.power(x, 2), axis=[-1], keepdims=True); r = R.rsqrt(s + eps); y = w * (x * r)
->  y = rms_norm(x, w)            # Composite = "crossloom.rms_norm", body = the lines above

Fires for power/multiply/square squares, rsqrt, 1/sqrt, power(-0.5), division by sqrt, factors in any order, casts
around the core, any set of trailing axes; operands ``weight`` and ``bias`` are there where the model has them.
Never when the mean is taken of another value than the one that is scaled, over axes that are not the last ones,
or when an inner value is read elsewhere.

Attributes: ``axes`` (counted from the end), ``epsilon``.
Numerics: exact; the body is the model's own spelling.  Source: Zhang & Sennrich 2019; Ba et al. 2016.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax

from crossloom.rewrite import Graph, Match, Rule, Site
from crossloom.verdict import Verdict, refuse

from .matching.factors import Statistics, factors, reduction, spans, squared, trailing
from .matching.spelling import either, matched, replay, replayable, uncast

_PRODUCTS = frozenset({"relax.multiply", "relax.divide"})
#: Operands and facts.
_Norm = tuple[dict[str, relax.Expr], dict[str, object]]


def _centred(graph: Graph, expr: relax.Expr) -> tuple[relax.Expr, list[int]] | None:
    """Return (x, axes) where ``expr`` is ``x - mean(x)``."""
    call = graph.call(uncast(graph, expr), "relax.subtract")
    if call is None:
        return None
    mean = reduction(graph, call.args[1], "relax.mean")
    return mean if mean is not None and mean[0].same_as(call.args[0]) else None


def _source(graph: Graph, found: Statistics) -> tuple[relax.Expr, list[int], bool] | None:
    """Return (x, axes, centred) of a mean of squares, or of a variance."""
    if (direct := reduction(graph, found.statistic, "relax.variance")) is not None:
        return uncast(graph, direct[0]), direct[1], True
    squares = reduction(graph, found.statistic, "relax.mean")
    inner = squared(graph, uncast(graph, squares[0])) if squares is not None else None
    if squares is None or inner is None:
        return None
    if (centred := _centred(graph, inner)) is not None and centred[1] == squares[1]:
        return uncast(graph, centred[0]), centred[1], True
    return uncast(graph, inner), squares[1], False


def _match(graph: Graph, root: relax.Expr) -> tuple[_Norm | Verdict, bool] | None:
    """Return (operands and facts, or a refusal; centred) of the product that a norm is."""
    found = factors(graph, root, None)[1]
    source = _source(graph, found) if found is not None else None
    if found is None or source is None:
        return None
    x, axes, centred = source
    # A second look keeps x in one piece, be it a product itself.
    leaves, _ = factors(graph, root, x)
    own: list[relax.Expr] = []
    rest: list[relax.Expr] = []
    for leaf in leaves:
        of = _centred(graph, leaf) if centred else None
        same = of is not None and of[1] == axes and uncast(graph, of[0]).same_as(x)
        (own if same or (not centred and uncast(graph, leaf).same_as(x)) else rest).append(leaf)
    # More factors are no norm; none at all is the inverse root by itself.
    if not leaves or len(rest) > 1 or len(own) > 1:
        return None
    if not own:
        return refuse("mean-of-another-value", getattr(x, "name", "")), centred
    if not trailing(axes):
        return refuse("axes-not-trailing", getattr(x, "name", ""), f"axes {axes} from the end"), centred
    if rest and not spans(x, rest[0], axes):
        return refuse("weight-does-not-span-axes", getattr(rest[0], "name", "")), centred
    operands = {"x": x, **({"weight": rest[0]} if rest else {})}
    return (operands, {"axes": axes, "epsilon": found.epsilon}), centred


def _kind(centred: bool, weighted: bool) -> Callable[[Graph, relax.Var], Match | Verdict | None]:
    def match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
        found = _match(graph, root)
        if found is None or found[1] != centred:
            return None
        if isinstance(found[0], Verdict):
            # Told once, by one of the two rules of its name.
            return found[0] if weighted else None
        operands, facts = found[0]
        return matched(graph, root, operands, **facts) if ("weight" in operands) == weighted else None

    return match


def _match_biased(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    for product, bias in either(graph.value[root]):
        core = uncast(graph, product)
        if graph.op(core) not in _PRODUCTS:
            continue
        found = _match(graph, core)
        if found is None or isinstance(found[0], Verdict) or not found[1]:
            continue
        operands, facts = found[0]
        if spans(operands["x"], bias, facts["axes"]):  # type: ignore[arg-type]
            return matched(graph, root, {**operands, "bias": bias}, **facts)
    return None


def _match_operator(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    call = graph.value[root]
    rank = call.args[0].ty.ndim
    axes = sorted(int(a) - rank if a >= 0 else int(a) for a in call.attrs.axes)
    if not trailing(axes):
        return refuse("axes-not-trailing", root.name, f"axes {axes} from the end")
    names = ("x", "weight", "bias")
    return matched(graph, root, dict(zip(names, call.args, strict=False)), axes=axes, epsilon=float(call.attrs.epsilon))


def _outline(name: str) -> Callable[[Site], relax.Expr]:
    def replace(site: Site) -> relax.Expr:
        facts = site.match.facts
        return replay(site, name, {"axes": facts["axes"], "epsilon": facts["epsilon"]})

    return replace


def norm_rules() -> list[Rule]:
    """Return the rules, in order of priority: what takes most operands along comes first."""
    layer, rms = _outline("crossloom.layer_norm"), _outline("crossloom.rms_norm")
    return [
        Rule("layer-norm", frozenset({"relax.nn.layer_norm"}), _match_operator, layer, legal=replayable),
        Rule("rms-norm", frozenset({"relax.nn.rms_norm"}), _match_operator, rms, legal=replayable),
        Rule("layer-norm", frozenset({"relax.add"}), _match_biased, layer, legal=replayable),
        Rule("layer-norm", _PRODUCTS, _kind(True, True), layer, legal=replayable),
        Rule("rms-norm", _PRODUCTS, _kind(False, True), rms, legal=replayable),
        Rule("layer-norm", _PRODUCTS, _kind(True, False), layer, legal=replayable),
        Rule("rms-norm", _PRODUCTS, _kind(False, False), rms, legal=replayable),
    ]
