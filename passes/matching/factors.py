"""Read a norm: a product of a value, the inverse root of its statistics and a weight, in any order."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax

from crossloom.rewrite import Graph

from .spelling import dims, either, same_dims, scalar, sizes, uncast

#: A value, its statistics and a weight; more factors are no norm.
_MOST = 4


def squared(graph: Graph, expr: relax.Expr) -> relax.Expr | None:
    """Return x where ``expr`` is x squared."""
    if (call := graph.call(expr, "relax.multiply")) is not None:
        return call.args[0] if call.args[0].same_as(call.args[1]) else None
    if (call := graph.call(expr, "relax.square")) is not None:
        return call.args[0]
    call = graph.call(expr, "relax.power")
    return call.args[0] if call is not None and scalar(graph, call.args[1]) == 2.0 else None


def _root(graph: Graph, expr: relax.Expr) -> relax.Expr | None:
    """Return v where ``expr`` is v to the power 1/2."""
    expr = uncast(graph, expr)
    if (call := graph.call(expr, "relax.sqrt")) is not None:
        return call.args[0]
    call = graph.call(expr, "relax.power")
    return call.args[0] if call is not None and scalar(graph, call.args[1]) == 0.5 else None


def _inverse_root(graph: Graph, expr: relax.Expr) -> relax.Expr | None:
    """Return v where ``expr`` is v to the power -1/2: rsqrt, 1/sqrt, (sqrt)^-1 or v^-0.5."""
    expr = uncast(graph, expr)
    if (call := graph.call(expr, "relax.rsqrt")) is not None:
        return call.args[0]
    if (call := graph.call(expr, "relax.divide")) is not None and scalar(graph, call.args[0]) == 1.0:
        return _root(graph, call.args[1])
    if (call := graph.call(expr, "relax.power")) is None:
        return None
    power = scalar(graph, call.args[1])
    if power == -0.5:
        return call.args[0]
    return _root(graph, call.args[0]) if power == -1.0 else None


@dataclass(frozen=True)
class Statistics:
    """``statistic + epsilon`` under the root; the statistic is a mean of squares or a variance over ``axes``."""

    statistic: relax.Expr
    epsilon: float


def _statistics(graph: Graph, under_root: relax.Expr) -> Statistics | None:
    if (add := graph.call(uncast(graph, under_root), "relax.add")) is not None:
        for statistic, epsilon in either(add):
            value = scalar(graph, epsilon)
            if value is not None:
                return Statistics(uncast(graph, statistic), value)
    return None


def reduction(graph: Graph, expr: relax.Expr, op: str) -> tuple[relax.Expr, list[int]] | None:
    """Return (value, axes counted from the end) of a mean or variance that keeps its axes."""
    call = graph.call(uncast(graph, expr), op)
    if call is None or call.attrs.axis is None or not call.attrs.keepdims:
        return None
    rank = len(dims(call.args[0]) or ())
    return call.args[0], sorted(int(a) - rank if a >= 0 else int(a) for a in call.attrs.axis)


def trailing(axes: list[int]) -> bool:
    """Return whether axes counted from the end are the last ones."""
    return axes == list(range(-len(axes), 0))


def factors(graph: Graph, expr: relax.Expr, whole: relax.Expr | None) -> tuple[list[relax.Expr], Statistics | None]:
    """Return the factors of a product, and the statistics whose inverse root is one of them.

    ``whole`` (or a cast of it) is not taken apart, though it may be a product itself.
    """
    leaves: list[relax.Expr] = []
    found: Statistics | None = None
    stack = [expr]
    while stack and len(leaves) + len(stack) <= _MOST:
        # Breadth first: the nearest inverse root is this norm's, one further in belongs to what it normalises.
        at = stack.pop(0)
        inner = uncast(graph, at)
        if whole is not None and inner.same_as(whole):
            leaves.append(at)
            continue
        if found is None and (under := _inverse_root(graph, at)) is not None:
            found = _statistics(graph, under)
            if found is not None:
                continue
        divided = graph.call(inner, "relax.divide")
        if found is None and divided is not None and (under := _root(graph, divided.args[1])) is not None:
            found = _statistics(graph, under)
            if found is not None:
                stack.append(divided.args[0])
                continue
        product = graph.call(inner, "relax.multiply")
        if product is not None and len(leaves) + len(stack) + 2 <= _MOST:
            stack.extend(product.args)
        else:
            leaves.append(at)
    return (leaves, found) if not stack else ([], None)


def spans(x: relax.Expr, weight: relax.Expr, axes: list[int]) -> bool:
    """Return whether a weight spans the normalised axes, leading ones of size 1 aside."""
    shape, wide, static = dims(weight), dims(x), sizes(weight)
    if shape is None or wide is None or static is None or len(shape) > len(wide):
        return False
    extra = max(len(shape) - len(axes), 0)
    return all(s == 1 for s in static[:extra]) and same_dims(shape[extra:], wide[-len(axes) :])
