"""Append to the caches of all layers at once, where they stand in one tensor.

    a = R.concat((R.take(past, 0, axis=0), k0), axis=2); b = R.concat((R.take(past, 1, axis=0), k1), axis=2)
    y = R.concat((R.expand_dims(a, 0), R.expand_dims(b, 0)), axis=0)      # or R.stack
->  y = R.concat((past, R.concat((R.expand_dims(k0, 0), R.expand_dims(k1, 0)), axis=0)), axis=3)

Fires where every layer of a tensor is taken in order, something is appended to each along one axis, and the results are
put together again: a decoder's keys or values.  The cache is copied once then, not twice.  A layer's own longer cache
that is read elsewhere (by an attention that no kernel took) is still made.
Never for some of the layers, for layers in another order, or for layers of different tensors.

Numerics: exact.  Linear in the module's size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import tvm
from tvm import relax

from crossloom.numerics import EXACT
from crossloom.registry import PassInfo
from crossloom.rewrite import Graph, Match, Rule, Site, rewrite_pass
from crossloom.verdict import Verdict, accept, refuse

from .matching.spelling import dims, dtype, fields_of, interior, same_dims, scalar, sizes

_NAME = "fuse-cache-append"


@dataclass(frozen=True)
class _Append:
    """One layer's cache with something behind it."""

    past: relax.Expr
    layer: int
    new: relax.Expr
    axis: int


def _appended(graph: Graph, expr: relax.Expr) -> _Append | None:
    """Return what a cache taken from a stack, and appended to, is made of."""
    call = graph.call(expr, "relax.concat")
    fields = fields_of(graph, call.args[0]) if call is not None else []
    if call is None or len(fields) != 2 or call.attrs.axis is None:
        return None
    taken = graph.call(fields[0], "relax.take")
    if taken is None or taken.attrs.axis is None or int(taken.attrs.axis) != 0 or dims(taken.args[1]) != []:
        return None
    layer = scalar(graph, taken.args[1])
    count = (sizes(taken.args[0]) or [None])[0]
    if layer is None or count is None or not 0 <= layer < count:
        return None
    return _Append(taken.args[0], int(layer), fields[1], int(call.attrs.axis) % len(dims(expr) or ()))


def _layers(graph: Graph, root: relax.Var) -> list[relax.Expr]:
    """Return the values that are put together along a new first axis."""
    call = graph.call(root, "relax.concat", "relax.stack")
    if call is None or call.attrs.axis is None or int(call.attrs.axis) != 0:
        return []
    fields = fields_of(graph, call.args[0])
    if call.op.name == "relax.stack":
        return fields
    lifted = [graph.call(field, "relax.expand_dims") for field in fields]
    inner = [c.args[0] for c in lifted if c is not None and [int(a) for a in c.attrs.axis] == [0]]
    return inner if len(inner) == len(fields) else []


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    found = [_appended(graph, layer) for layer in _layers(graph, root)]
    parts = [part for part in found if part is not None]
    if not parts or len(parts) < len(found):
        return None
    first = parts[0]
    if any(not p.past.same_as(first.past) or p.axis != first.axis for p in parts):
        return refuse("different-caches", root.name, "layers are of several tensors, or longer along several axes")
    if [p.layer for p in parts] != list(range((sizes(first.past) or [0])[0] or 0)):
        return refuse("not-every-layer", root.name, f"layers {', '.join(str(p.layer) for p in parts)}")
    if any(not same_dims(dims(p.new) or (), dims(first.new) or (None,)) for p in parts):
        return refuse("different-lengths", root.name, "what is appended differs in shape between layers")
    values = {"past": first.past, **{f"new{i}": p.new for i, p in enumerate(parts)}}
    return Match(graph, root, values, interior(graph, root, list(values.values())), {"axis": first.axis + 1})


def _worth(m: Match) -> Verdict:
    """Return what is saved: one copy of the cache, read and written."""
    shape = sizes(m["past"]) or []
    if any(n is None for n in shape):
        return accept()
    return accept(bytes_saved=2 * math.prod(n or 0 for n in shape) * tvm.DataType(dtype(m["past"])).bits // 8)


def _replace(site: Site) -> relax.Expr:
    op, emit = relax.op, site.builder.emit
    new = [emit(op.expand_dims(site[name], 0)) for name in site.match.captures if name != "past"]
    stacked = new[0] if len(new) == 1 else emit(op.concat(new, 0))
    return op.concat([site["past"], stacked], site.match.facts["axis"])


def FuseCacheAppend() -> tvm.transform.Pass:
    """Return the pass; see the module's docstring."""
    roots = frozenset({"relax.concat", "relax.stack"})
    return rewrite_pass(_NAME, [Rule("cache-append", roots, _match, _replace, worth=_worth, shared_interior=True)])


PASS = PassInfo(_NAME, FuseCacheAppend, "fuse", EXACT, doc="Stacked caches grow in one copy.")
