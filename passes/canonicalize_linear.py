"""Recognise linear layers and embedding lookups.

    wt = R.permute_dims(w); t = R.matmul(x, wt); y = R.add(t, bias)
->  y = linear(x, w, bias)        # Composite = "crossloom.linear", weight_layout = "out_in"

Fires for a rank-2 weight (parameter or constant), transposed or not, with an optional rank-1 bias on either side
of the sum; ``R.take`` of rows of a weight becomes ``crossloom.embedding``.
Never for products of two activations (``R.matmul`` of rank > 2 right operands: attention), nor when the bias
widens the product's shape.

Numerics: exact; the body is the model's own spelling.
"""

from __future__ import annotations

from tvm import relax

from crossloom.rewrite import Graph, Match, Rule, Site
from crossloom.verdict import Verdict, refuse

from ._match_spelling import dims, dtype, either, is_weight, matched, replay, replayable, same_dims


def weight_of(graph: Graph, expr: relax.Expr) -> tuple[relax.Expr, str] | None:
    """Return (weight, layout) of a matmul's right operand, layout ``in_out`` or ``out_in``."""
    shape = dims(expr)
    if shape is None or len(shape) != 2:
        return None
    if is_weight(graph, expr):
        return expr, "in_out"
    transposed = graph.call(expr, "relax.permute_dims")
    if transposed is None or not is_weight(graph, transposed.args[0]):
        return None
    axes = transposed.attrs.axes
    if axes is not None and [int(a) % 2 for a in axes] != [1, 0]:
        return transposed.args[0], "in_out"
    # A transposed weight with several readers exists anyway: take it as it is.
    if isinstance(expr, relax.Var) and graph.uses(expr) > 1:
        return expr, "in_out"
    return transposed.args[0], "out_in"


def _match_biased(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    for product, bias in either(graph.value[root]):
        call = graph.call(product, "relax.matmul")
        if call is None or (weight := weight_of(graph, call.args[1])) is None:
            continue
        shape, wide = dims(bias), dims(root)
        if shape is None or wide is None or len(shape) != 1 or not is_weight(graph, bias):
            continue
        if not same_dims(wide, dims(product) or ()) or not same_dims(shape, wide[-1:]):
            return refuse("bias-is-not-one-per-output", getattr(bias, "name", ""))
        captures = {"x": call.args[0], "weight": weight[0], "bias": bias}
        return matched(graph, root, captures, weight_layout=weight[1])
    return None


def _match_plain(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    call = graph.value[root]
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
    """Match a linear layer at a sum or a product."""
    if graph.op(root) == "relax.add":
        return _match_biased(graph, root)
    return _match_plain(graph, root) if graph.op(root) == "relax.matmul" else None


def _match_embedding(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    call = graph.value[root]
    table, ids = call.args[0], call.args[1]
    shape = dims(table)
    if shape is None or len(shape) != 2 or not is_weight(graph, table) or "int" not in dtype(ids):
        return None
    axis = call.attrs.axis
    if axis is None or int(axis) % 2 != 0:
        return refuse("not-a-row-lookup", getattr(table, "name", ""), f"axis {axis}")
    return matched(graph, root, {"weight": table, "ids": ids})


def _linear(site: Site) -> relax.Expr:
    return replay(site, "crossloom.linear", {"weight_layout": site.match.facts["weight_layout"]})


def linear_rules() -> list[Rule]:
    """Return the rules, in order of priority."""
    return [
        Rule("linear", frozenset({"relax.add"}), _match_biased, _linear, legal=replayable),
        Rule("linear", frozenset({"relax.matmul"}), _match_plain, _linear, legal=replayable),
        Rule(
            "embedding",
            frozenset({"relax.take"}),
            _match_embedding,
            lambda site: replay(site, "crossloom.embedding"),
            legal=replayable,
        ),
    ]
