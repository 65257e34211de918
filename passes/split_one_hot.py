"""A linear layer over one-hot integers is a lookup of its weight's rows.

    h = R.concat((features, R.one_hot(ids, 1, 0, depth)), axis=-1); y = linear(h, w, b)
->  y = R.add(linear(features, w[:k], b), embedding(w[k:], ids))

Fires for any number of values beside one lot of one-hot integers or several, in any order, and for one-hot integers
alone; spelled as an operator, or as a comparison with 0, 1, 2 ..., cast to floats or choosing between 1 and 0 (ONNX's
OneHot).  An integer that is no class gives a row of zeros.
Never for other values than 1 and 0, nor along another axis than the last.

Numerics: reassociates (sums without the products with zero).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tvm import relax

from crossloom.rewrite import Graph, Match, Rule, Site, outline
from crossloom.verdict import Verdict, accept, refuse

from .fold_linear_chain import layer_of
from .matching.spelling import dims, dtype, either, fields_of, interior, is_constant, scalar, sizes
from .regions.composites import linear

_LINEAR = "crossloom.linear"


@dataclass(frozen=True)
class _Columns:
    """Neighbouring inputs of a layer: of a value, or of one-hot integers."""

    value: relax.Expr
    start: int
    count: int
    one_hot: bool


def _classes(graph: Graph, expr: relax.Expr) -> tuple[relax.Expr, int] | Verdict | None:
    """Return the integers of a one-hot value and the number of classes."""
    inner = expr
    while (cast := graph.call(inner, "relax.astype")) is not None:
        inner = cast.args[0]
    call = graph.call(inner, "relax.one_hot")
    if call is not None:
        if int(call.attrs.axis) not in (-1, len(dims(call.args[0]) or ())):
            return refuse("one-hot-along-another-axis", getattr(expr, "name", ""))
        if [float(getattr(a, "value", np.nan)) for a in call.args[1:3]] != [1.0, 0.0]:
            return refuse("one-hot-of-other-values", getattr(expr, "name", ""))
        return call.args[0], int(call.attrs.depth)
    compared = graph.call(inner, "relax.equal")
    chosen = graph.call(inner, "relax.where")
    if chosen is not None and (scalar(graph, chosen.args[1]), scalar(graph, chosen.args[2])) == (1.0, 0.0):
        inner, compared = chosen.args[0], graph.call(chosen.args[0], "relax.equal")
    for ids, classes in either(compared) if compared is not None and inner is not expr else ():
        count = _counts_up(graph, classes)
        spread = graph.call(ids, "relax.expand_dims", "relax.reshape")
        rank = len(dims(inner) or ())
        if count is not None and spread is not None and len(dims(spread.args[0]) or ()) == rank - 1:
            if (sizes(ids) or [None])[-1] == 1 and len(dims(ids) or ()) == rank:
                return spread.args[0], count
    return None


def _counts_up(graph: Graph, expr: relax.Expr) -> int | None:
    """Return n where a value is 0 .. n - 1 along its last axis."""
    value, shape = graph.resolve(expr), sizes(expr) or []
    if any(d != 1 for d in shape[:-1]) or not shape or shape[-1] is None:
        return None
    while isinstance(value, relax.Call) and graph.op(value) in ("relax.reshape", "relax.expand_dims", "relax.astype"):
        value = graph.resolve(value.args[0])
    if is_constant(value):
        return shape[-1] if np.array_equal(value.value.numpy().reshape(-1), np.arange(shape[-1])) else None
    if isinstance(value, relax.Call) and graph.op(value) == "relax.arange":
        start, end, step = (getattr(a, "value", None) for a in value.args[:3])
        return shape[-1] if (start, end, step) == (0, shape[-1], 1) else None
    return None


def _columns(graph: Graph, x: relax.Expr) -> list[_Columns] | Verdict | None:
    joined = graph.call(x, "relax.concat")
    rank = len(dims(x) or ())
    fields: Sequence[relax.Expr] = [x]
    if joined is not None and joined.attrs.axis is not None and int(joined.attrs.axis) % rank == rank - 1:
        fields = getattr(joined.args[0], "fields", None) or fields_of(graph, joined.args[0])
    out: list[_Columns] = []
    start = 0
    for field in fields:
        count = (sizes(field) or [None])[-1]
        found = _classes(graph, field)
        if isinstance(found, Verdict):
            return found
        if count is None:
            return None
        out.append(_Columns(field if found is None else found[0], start, count, found is not None))
        start += count
    return out if any(c.one_hot for c in out) else None


def _match(graph: Graph, root: relax.Var) -> Match | Verdict | None:
    layer = layer_of(graph, root)
    if layer is None:
        return None
    columns = _columns(graph, layer[0]["x"])
    if not isinstance(columns, list):
        return columns
    captures: dict[str, relax.Expr] = {name: value for name, value in layer[0].items() if name != "x"}
    captures |= {f"part{i}": c.value for i, c in enumerate(columns)}
    inside = interior(graph, root, list(captures.values()))
    return Match(graph, root, captures, inside, {"columns": columns, "layout": layer[1]})


def _legal(m: Match) -> Verdict:
    values = [c.value for c in m.facts["columns"] if not c.one_hot]
    kinds = {dtype(m["weight"]), dtype(m.root), *(dtype(v) for v in values)}
    return refuse("different-dtypes", m.root.name, ", ".join(sorted(kinds))) if len(kinds) > 1 else accept()


def _worth(m: Match) -> Verdict:
    rows = 1
    for size in (sizes(m.root) or [1])[:-1]:
        rows *= size or 1
    wide = (sizes(m.root) or [0])[-1] or 0
    spared = sum(c.count for c in m.facts["columns"] if c.one_hot)
    return accept(macs=rows * spared * wide)


def _rows(site: Site, columns: Sequence[_Columns]) -> relax.Expr:
    """Return ``(inputs, outputs)`` of some of a layer's inputs."""
    emit, op, weight = site.builder.emit, relax.op, site["weight"]
    if site.match.facts["layout"] == "out_in":
        weight = emit(op.permute_dims(weight, [1, 0]))
    picked = np.concatenate([np.arange(c.start, c.start + c.count) for c in columns])
    return emit(op.take(weight, relax.const(picked, "int64"), axis=0))


def _looked_up(site: Site, number: int, column: _Columns) -> relax.Expr:
    emit, op = site.builder.emit, relax.op
    rows = _rows(site, [column])
    # One row more, of zeros, for integers that are no class.
    width, kind = int(rows.ty.shape[1]), str(rows.ty.dtype)
    table = emit(op.concat([rows, relax.const(np.zeros((1, width), kind), kind)], 0))
    ids = site[f"part{number}"]
    ids = ids if dtype(ids) == "int64" else emit(op.astype(ids, "int64"))
    last = relax.const(column.count, "int64")
    ids = emit(op.where(emit(op.less(ids, relax.const(0, "int64"))), last, ids))

    def body(builder: relax.BlockBuilder, weight: relax.Var, ids: relax.Var) -> relax.Expr:
        return op.take(weight, ids, axis=0, mode="clip")

    return outline(site, "crossloom.embedding", {"weight": table, "ids": ids}, body, {"mode": "clip"})


def _replace(site: Site) -> relax.Expr:
    emit, op = site.builder.emit, relax.op
    columns: list[_Columns] = site.match.facts["columns"]
    plain = [(i, c) for i, c in enumerate(columns) if not c.one_hot]
    terms = [_looked_up(site, i, c) for i, c in enumerate(columns) if c.one_hot]
    if plain:
        values = [site[f"part{i}"] for i, _ in plain]
        x = values[0] if len(values) == 1 else emit(op.concat(values, -1))
        bias = site["bias"] if "bias" in site.match.captures else None
        terms = [linear(site, x, _rows(site, [c for _, c in plain]), bias), *terms]
    if not plain and "bias" in site.match.captures:
        terms.append(site["bias"])
    out = terms[0]
    for term in terms[1:]:
        out = op.add(emit(out), emit(term) if isinstance(term, relax.Call) else term)
    return out


def one_hot_rules() -> list[Rule]:
    """Return the rules."""
    return [Rule("one-hot", frozenset({_LINEAR}), _match, _replace, _legal, _worth, shared_interior=True)]
