"""Append to a stack of caches as a whole, not to each layer's cache before they are stacked again.

    k0 = R.concat((R.take(past, 0, axis=0), new0), axis=2); k1 = R.concat((R.take(past, 1, axis=0), new1), axis=2)
    present = R.concat((R.expand_dims(k0, 0), R.expand_dims(k1, 0)), axis=0)
->  new = R.concat((R.expand_dims(new0, 0), R.expand_dims(new1, 0)), axis=0)
    present = R.concat((past, new), axis=3)

Fires for a stack of as many layers as ``past`` has, each its own layer's cache with what it appends behind it, along
the same axis.  What attention reads of a layer's cache stays; its kernel reads the stack where it is.
Never for layers in another order, for some layers only, nor for caches appended to in front.

Numerics: exact.  Linear in the module's size.
"""

from __future__ import annotations

import tvm
from tvm import relax

from crossloom.numerics import EXACT
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, Match, Rule, Site, rewrite_pass
from crossloom.verdict import Verdict, accept, refuse

from .matching.spelling import dims, fields_of, interior, same_dims, scalar, sizes
from .regions.views import constants

_NAME = "lift-cache-stack"
_UNITS = ("relax.expand_dims", "relax.reshape", "relax.squeeze")


def _unit(graph: Graph, expr: relax.Expr, inner_rank: int, outer_rank: int) -> relax.Expr | None:
    """Return what a value of ``outer_rank`` differs from by one leading axis of size 1."""
    call = graph.call(expr, *_UNITS)
    if call is None:
        return None
    small, large = sorted((dims(call.args[0]) or [], dims(expr) or []), key=len)
    fits = (len(dims(call.args[0]) or []), len(dims(expr) or [])) == (inner_rank, outer_rank)
    return call.args[0] if fits and same_dims([1, *small], large) else None


def _layer(graph: Graph, expr: relax.Expr) -> tuple[relax.Expr, int] | None:
    """Return (stack, number) where ``expr`` is one layer of a stack along its first axis."""
    if (taken := graph.call(expr, "relax.take")) is not None:
        number = scalar(graph, taken.args[1])
        one = number is not None and not (dims(taken.args[1]) or []) and taken.attrs.axis is not None
        return (taken.args[0], int(number)) if one and int(taken.attrs.axis) == 0 else None  # type: ignore[arg-type]
    rank = len(dims(expr) or ())
    inner = _unit(graph, expr, rank + 1, rank)
    cut = graph.call(inner, "relax.strided_slice") if inner is not None else None
    if cut is None:
        return None
    axes, begins, ends = (constants(arg) for arg in cut.args[1:4])
    whole = axes == [0] and begins is not None and len(begins) == 1 and ends == [begins[0] + 1]
    return (cut.args[0], begins[0]) if whole and begins is not None else None


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    join = graph.resolve(root)
    parts, rank = fields_of(graph, join.args[0]), len(dims(root) or ())
    if len(parts) < 2 or rank < 2 or join.attrs.axis is None or int(join.attrs.axis) % rank != 0:
        return None
    news: list[relax.Expr] = []
    found: list[tuple[relax.Expr, int, int]] = []
    for part in parts:
        inner = _unit(graph, part, rank - 1, rank)
        grown = graph.call(inner, "relax.concat") if inner is not None else None
        pair = fields_of(graph, grown.args[0]) if grown is not None else []
        layer = _layer(graph, pair[0]) if len(pair) == 2 else None
        if grown is None or layer is None or grown.attrs.axis is None:
            return None
        found.append((*layer, int(grown.attrs.axis) % (rank - 1)))
        news.append(pair[1])
    past, _, axis = found[0]
    if any(not stack.same_as(past) or along != axis for stack, _, along in found):
        return refuse("caches-of-several-stacks", root.name)
    if [number for _, number, _ in found] != list(range(len(parts))) or (sizes(past) or [None])[0] != len(parts):
        return refuse("layers-out-of-order", root.name, ", ".join(str(number) for _, number, _ in found))
    captures = {"past": past, **{f"new{i}": new for i, new in enumerate(news)}}
    return Match(graph, root, captures, interior(graph, root, list(captures.values())), {"axis": axis})


def _legal(m: Match) -> Verdict:
    return accept(detail=f"{len(m.captures) - 1} layers")


def _replace(site: Site) -> relax.Expr:
    emit, count = site.builder.emit, len(site.match.captures) - 1
    stacked = [emit(relax.op.expand_dims(site[f"new{i}"], [0])) for i in range(count)]
    new = emit(relax.op.concat(stacked, axis=0))
    return relax.op.concat([site["past"], new], axis=site.match.facts["axis"] + 1)


def LiftCacheStack() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    rule = Rule("cache-stack", frozenset({"relax.concat"}), _match, _replace, legal=_legal, shared_interior=True)
    return rewrite_pass(_NAME, [rule])


PASS = PassInfo(_NAME, LiftCacheStack, "canonicalize", EXACT, doc="Stacks of caches are appended to as a whole.")
