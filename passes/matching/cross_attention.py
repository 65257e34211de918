"""Cross-attention: which linear layers make keys and values of what another sequence says."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax

from crossloom.rewrite import Graph, composite_name

from .spelling import scalar

LINEAR = "crossloom.linear"
_ATTENTION = "crossloom.attention"
VIEWS = ("relax.reshape", "relax.permute_dims", "relax.expand_dims", "relax.squeeze")


@dataclass(frozen=True)
class Projection:
    """A linear layer that makes keys or values.

    Attributes
    ----------
    layer : relax.Var
    states : relax.Var
        What it is of.
    views : tuple of relax.Var
        The views from its result to the attention, nearest first.
    attention : relax.Var
    role : str
        ``k`` or ``v``.
    """

    layer: relax.Var
    states: relax.Var
    views: tuple[relax.Var, ...]
    attention: relax.Var
    role: str


def linear_behind(graph: Graph, expr: relax.Expr) -> tuple[relax.Var, tuple[relax.Var, ...]] | None:
    """Return the linear layer that a value is a view of, and the views, nearest to the layer first."""
    views: list[relax.Var] = []
    while isinstance(expr, relax.Var) and expr in graph.value:
        callee = graph.callee(expr)
        if callee is not None:
            return (expr, tuple(reversed(views))) if composite_name(callee) == LINEAR else None
        call = graph.call(expr, *VIEWS)
        if call is None:
            return None
        views.append(expr)
        expr = call.args[0]
    return None


def _query_of(graph: Graph, expr: relax.Expr) -> relax.Expr | None:
    """Return the value that queries are made from, through factors and rotations; None where it cannot be told."""
    while True:
        if isinstance(expr, relax.Var) and expr not in graph.value:
            return expr
        found = linear_behind(graph, expr)
        if found is not None:
            return graph.value[found[0]].args[0]
        callee = graph.callee(expr)
        if callee is not None:
            if composite_name(callee) != "crossloom.rotary":
                return None
            expr = graph.operands(expr)["x"]
        elif (call := graph.call(expr, *VIEWS, "relax.astype")) is not None:
            expr = call.args[0]
        elif (call := graph.call(expr, "relax.multiply", "relax.divide")) is not None:
            rest = [a for a in call.args if scalar(graph, a) is None]
            if len(rest) != 1:
                return None
            expr = rest[0]
        else:
            return None


def operands_of(graph: Graph, attention: relax.Var) -> dict[str, relax.Expr] | None:
    """Return the operands of an attention by name, None where a binding is none."""
    callee = graph.callee(attention)
    if callee is None or composite_name(callee) != _ATTENTION:
        return None
    return graph.operands(attention)


def cross_projections(graph: Graph) -> list[Projection]:
    """Return the projections of cross-attentions in program order.

    An attention's keys and values are of another sequence where its queries are made from another value; one whose
    queries are of unknown origin is none.
    """
    out = []
    for var in graph.order:
        operands = operands_of(graph, var)
        if operands is None:
            continue
        query = _query_of(graph, operands["q"])
        for role in ("k", "v") if query is not None else ():
            found = linear_behind(graph, operands[role])
            states = graph.value[found[0]].args[0] if found is not None else None
            if found is not None and isinstance(states, relax.Var) and not states.same_as(query):
                out.append(Projection(found[0], states, found[1], var, role))
    return out
