"""Read a softmax over the last axis: the operator, spelled out, and with guards for rows that keep no key.

torch's default decomposition zeroes rows of -inf by ``where(not any(scores != -inf), 0, softmax)``; the spelled
form does it by dividing by ``where(total > 0, total, 1)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import relax

from crossloom.rewrite import Graph
from crossloom.verdict import Verdict, refuse

from .heads import filled, through
from .spelling import dims, dtype, scalar


@dataclass(frozen=True)
class Weights:
    """A softmax of ``scores``; ``empty_rows`` (nothing but -inf) give ``zero`` or what ``softmax`` gives."""

    scores: relax.Expr
    empty_rows: str


def _last(graph: Graph, expr: relax.Expr, op: str) -> relax.Expr | None:
    """Return x where ``expr`` is a reduction of x over its last axis, kept as size 1."""
    call = graph.call(expr, op)
    if call is None or not call.attrs.keepdims or call.attrs.axis is None:
        return None
    rank = len(dims(call.args[0]) or ())
    return call.args[0] if [int(a) % rank for a in call.attrs.axis] == [rank - 1] else None


def _plain(graph: Graph, expr: relax.Expr) -> Weights | Verdict | None:
    call = graph.call(expr, "relax.nn.softmax")
    if call is None:
        return None
    rank = len(dims(call.args[0]) or ())
    if rank not in (3, 4) or int(call.attrs.axis) % rank != rank - 1:
        return refuse("softmax-not-over-keys", getattr(expr, "name", ""), f"axis {call.attrs.axis} of {rank}")
    return Weights(call.args[0], "softmax")


def _truth(graph: Graph, expr: relax.Expr) -> relax.Expr:
    """Return what ``expr`` is true of: casts to and from booleans keep what is zero and what is not."""
    expr = through(graph, expr)
    while (cast := graph.call(expr, "relax.astype")) is not None and "bool" in (dtype(cast), dtype(cast.args[0])):
        expr = through(graph, cast.args[0])
    return expr


def _nothing_kept(graph: Graph, expr: relax.Expr) -> relax.Expr | None:
    """Return the scores where ``expr`` is true for the rows that are -inf throughout."""
    expr = _truth(graph, expr)
    if (negated := graph.call(expr, "relax.logical_not")) is None:
        return None
    some = _last(graph, _truth(graph, negated.args[0]), "relax.max")
    if some is None or (kept := graph.call(_truth(graph, some), "relax.logical_not")) is None:
        return None
    dropped = graph.call(_truth(graph, kept.args[0]), "relax.equal")
    return dropped.args[0] if dropped is not None and scalar(graph, dropped.args[1]) == -math.inf else None


def _guarded(graph: Graph, expr: relax.Expr) -> Weights | Verdict | None:
    call = graph.call(expr, "relax.where")
    if call is None or filled(graph, call.args[1]) != 0.0:
        return None
    found = _plain(graph, through(graph, call.args[2]))
    if not isinstance(found, Weights):
        return found
    scores = _nothing_kept(graph, call.args[0])
    if scores is None or not through(graph, scores).same_as(through(graph, found.scores)):
        return refuse("guard-of-other-scores", getattr(expr, "name", ""))
    return Weights(found.scores, "zero")


def _spelled(graph: Graph, expr: relax.Expr) -> Weights | None:
    call = graph.call(expr, "relax.divide")
    if call is None or (exp := graph.call(call.args[0], "relax.exp")) is None:
        return None
    total, empty_rows = call.args[1], "softmax"
    if (guard := graph.call(total, "relax.where")) is not None:
        some = graph.call(guard.args[0], "relax.greater")
        if some is None or scalar(graph, some.args[1]) != 0.0 or scalar(graph, guard.args[2]) in (None, 0.0):
            return None
        if not some.args[0].same_as(guard.args[1]):
            return None
        total, empty_rows = guard.args[1], "zero"
    summed, shifted = _last(graph, total, "relax.sum"), graph.call(exp.args[0], "relax.subtract")
    if summed is None or not summed.same_as(call.args[0]) or shifted is None:
        return None
    scores, top = shifted.args
    if (floor := graph.call(top, "relax.maximum")) is not None:
        least = scalar(graph, floor.args[1])
        # Anything a score can reach must not be cut, or the row would not be shifted by its maximum.
        if least is None or least > -65504.0:
            return None
        top = floor.args[0]
    elif empty_rows == "zero":
        # exp(-inf - -inf) is not a number, and no guard of the sum repairs it.
        empty_rows = "softmax"
    highest = _last(graph, top, "relax.max")
    return Weights(scores, empty_rows) if highest is not None and highest.same_as(scores) else None


def softmax_of(graph: Graph, expr: relax.Expr) -> Weights | Verdict | None:
    """Return what ``expr`` is the softmax of, a refusal for one over another axis, None where it is none."""
    for read in (_plain, _guarded, _spelled):
        if (found := read(graph, expr)) is not None:
            return found
    return None
