"""Recognise linear layers and embedding lookups.

    wt = R.permute_dims(w); t = R.matmul(x, wt); y = R.add(t, bias)
->  y = linear(x, w, bias)        # Composite = "crossloom.linear", weight_layout = "out_in"

Fires for a rank-2 weight (parameter or constant, casts of them), transposed or not, with an optional bias of one
value per output (leading axes of size 1 allowed) on either side of the sum, the leading axes of x flattened in
front and restored behind; ``R.take`` of rows of a weight becomes ``crossloom.embedding`` with the take's ``mode``.
Never for products of two activations (``R.matmul`` of rank > 2 right operands: attention), nor when the bias
widens the product's shape.

Attributes: ``weight_layout`` (``in_out``, ``out_in``).

Numerics: exact; the body is the model's own spelling.
"""

from __future__ import annotations

from tvm import relax, tirx

from crossloom.rewrite import Graph, Match, Rule, Site
from crossloom.verdict import Verdict, refuse

from .matching.spelling import dims, dtype, either, is_weight, matched, replay, replayable, same_dims, sizes, uncast


def weight_of(graph: Graph, expr: relax.Expr) -> tuple[relax.Expr, str] | None:
    """Return (weight, layout) of a matmul's right operand, layout ``in_out`` or ``out_in``."""
    shape = dims(expr)
    if shape is None or len(shape) != 2:
        return None
    # A cast weight is an operand as it is: the cast is folded with the weights.
    if is_weight(graph, uncast(graph, expr)):
        return expr, "in_out"
    transposed = graph.call(expr, "relax.permute_dims")
    if transposed is None or not is_weight(graph, uncast(graph, transposed.args[0])):
        return None
    axes = transposed.attrs.axes
    if axes is not None and [int(a) % 2 for a in axes] != [1, 0]:
        return transposed.args[0], "in_out"
    # A transposed weight with several readers exists anyway: take it as it is.
    if isinstance(expr, relax.Var) and graph.uses(expr) > 1:
        return expr, "in_out"
    return transposed.args[0], "out_in"


def _one_per_output(bias: relax.Expr, wide: list[tirx.Expr]) -> bool:
    shape, static = dims(bias) or [], sizes(bias) or []
    return len(shape) <= len(wide) and all(d == 1 for d in static[:-1]) and same_dims(shape[-1:], wide[-1:])


def _match_biased(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    for product, bias in either(graph.resolve(root)):
        call = graph.call(product, "relax.matmul")
        if call is None or (weight := weight_of(graph, call.args[1])) is None:
            continue
        shape, wide = dims(bias), dims(root)
        if not shape or wide is None or not is_weight(graph, uncast(graph, bias)):
            continue
        if not same_dims(wide, dims(product) or ()) or not _one_per_output(bias, wide):
            return refuse("bias-is-not-one-per-output", getattr(bias, "name", ""))
        captures = {"x": call.args[0], "weight": weight[0], "bias": bias}
        return matched(graph, root, captures, weight_layout=weight[1])
    return None


def behind_reshape(graph: Graph, root: relax.Var) -> tuple[relax.Var, list[tirx.Expr]] | None:
    """Return (flat result, leading axes) where a root restores leading axes that were flattened."""
    inner, shape = graph.resolve(root).args[0], dims(root)
    before = dims(inner)
    if not isinstance(inner, relax.Var) or not shape or before is None or len(before) != 2 or len(shape) < 2:
        return None
    return (inner, shape[:-1]) if same_dims(shape[-1:], before[-1:]) else None


def before_flattening(graph: Graph, x: relax.Expr, leads: list[tirx.Expr]) -> relax.Expr | None:
    """Return the value of leading axes ``leads`` whose rows ``x`` (rows, features) is."""
    flat = graph.call(x, "relax.reshape")
    shape = dims(flat.args[0]) if flat is not None else None
    fits = shape is not None and same_dims(shape[:-1], leads) and same_dims(shape[-1:], (dims(x) or [])[-1:])
    return flat.args[0] if flat is not None and fits else None


def _match_flattened(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    if (behind := behind_reshape(graph, root)) is None:
        return None
    # What is refused there is told there.
    found = match_linear(graph, behind[0]) if behind[0] in graph.value else None
    x = before_flattening(graph, found["x"], behind[1]) if isinstance(found, Match) else None
    if not isinstance(found, Match) or x is None or graph.uses(behind[0]) > 1:
        return None
    return matched(graph, root, {**found.captures, "x": x}, **found.facts)


def _match_plain(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    call = graph.resolve(root)
    weight = weight_of(graph, call.args[1])
    if weight is None:
        return None
    users = graph.users.get(root, [])
    if len(users) == 1 and root not in graph.escapes and graph.op(users[0]) == "relax.add":
        # The rule before has judged the sum; what it took must not be reported twice.
        if isinstance(_match_biased(graph, users[0]), Match):
            return None
    return matched(graph, root, {"x": call.args[0], "weight": weight[0]}, weight_layout=weight[1])


def match_linear(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    """Match a linear layer at a sum, a product, or the view that restores its leading axes."""
    if graph.op(root) == "relax.add":
        return _match_biased(graph, root)
    if graph.op(root) == "relax.reshape":
        return _match_flattened(graph, root)
    return _match_plain(graph, root) if graph.op(root) == "relax.matmul" else None


def _match_rows(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    """Match a lookup whose indices were flattened in front and whose rows are told apart behind."""
    behind = behind_reshape(graph, root)
    take = graph.call(behind[0], "relax.take") if behind is not None else None
    if behind is None or take is None or graph.uses(behind[0]) > 1:
        return None
    found = _match_embedding(graph, behind[0])
    flat = graph.call(take.args[1], "relax.reshape")
    if not isinstance(found, Match) or flat is None or not same_dims(dims(flat.args[0]) or (), behind[1]):
        return None
    return matched(graph, root, {"weight": found["weight"], "ids": flat.args[0]}, **found.facts)


def _match_embedding(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    call = graph.resolve(root)
    table, ids = call.args[0], call.args[1]
    shape = dims(table)
    if shape is None or len(shape) != 2 or not is_weight(graph, uncast(graph, table)) or "int" not in dtype(ids):
        return None
    axis = call.attrs.axis
    if axis is None or int(axis) % 2 != 0:
        return refuse("not-a-row-lookup", getattr(table, "name", ""), f"axis {axis}")
    return matched(graph, root, {"weight": table, "ids": ids}, mode=str(call.attrs.mode))


def _linear(site: Site) -> relax.Expr:
    return replay(site, "crossloom.linear", {"weight_layout": site.match.facts["weight_layout"]})


def _embedding(site: Site) -> relax.Expr:
    return replay(site, "crossloom.embedding", {"mode": site.match.facts["mode"]})


def linear_rules() -> list[Rule]:
    """Return the rules, in order of priority."""
    return [
        Rule("linear", frozenset({"relax.reshape"}), _match_flattened, _linear, legal=replayable),
        Rule("linear", frozenset({"relax.add"}), _match_biased, _linear, legal=replayable),
        Rule("linear", frozenset({"relax.matmul"}), _match_plain, _linear, legal=replayable),
        Rule("embedding", frozenset({"relax.reshape"}), _match_rows, _embedding, legal=replayable),
        Rule("embedding", frozenset({"relax.take"}), _match_embedding, _embedding, legal=replayable),
    ]
