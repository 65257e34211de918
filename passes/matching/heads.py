"""Read the operands of attention: views, repeated heads, transposed keys, scales."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax

from crossloom.rewrite import Graph

from .spelling import dims, either, only_rounds, same_dims, scalar, sizes

_VIEWS = ("relax.astype", "relax.broadcast_to", "relax.reshape")


def _changes_nothing(call: relax.Call, regroup: bool) -> bool:
    """Return whether a view keeps every element where it is, (batch * heads) for (batch, heads) aside."""
    if call.op.name == "relax.astype":
        return only_rounds(call)
    before, after = dims(call.args[0]), dims(call)
    if before is None or after is None:
        return False
    if same_dims(before, after):
        return True
    merged = len(before) == 4 and len(after) == 3
    return regroup and call.op.name == "relax.reshape" and merged and same_dims(before[2:], after[1:])


def through(graph: Graph, expr: relax.Expr, regroup: bool = False) -> relax.Expr:
    """Return what casts and views that keep the axes were made from."""
    while (call := graph.call(expr, *_VIEWS)) is not None and _changes_nothing(call, regroup):
        expr = call.args[0]
    return expr


def through_views(graph: Graph, expr: relax.Expr, regroup: bool) -> relax.Expr:
    """Return what views and casts with no other reader were made from."""
    while isinstance(expr, relax.Var) and graph.uses(expr) == 1:
        call = graph.call(expr, *_VIEWS)
        if call is None or not _changes_nothing(call, regroup):
            return expr
        expr = call.args[0]
    return expr


def filled(graph: Graph, expr: relax.Expr) -> float | None:
    """Return the number that a constant, or a tensor filled with one, holds everywhere."""
    made = graph.call(expr, "relax.full", "relax.full_like")
    if graph.op(expr) in ("relax.zeros", "relax.zeros_like"):
        return 0.0
    return scalar(graph, made.args[1] if made is not None else expr)


def unscaled(graph: Graph, expr: relax.Expr) -> tuple[relax.Expr, float]:
    """Return (value, factor) with a scalar factor taken off."""
    if (call := graph.call(expr, "relax.multiply")) is not None:
        for value, factor in either(call):
            number = scalar(graph, factor)
            if number is not None and same_dims(dims(value) or (), dims(expr) or (None,)):
                return value, number
    if (call := graph.call(expr, "relax.divide")) is not None:
        number = scalar(graph, call.args[1])
        if number and same_dims(dims(call.args[0]) or (), dims(expr) or (None,)):
            return call.args[0], 1.0 / number
    return expr, 1.0


def operand(graph: Graph, expr: relax.Expr, regroup: bool) -> tuple[relax.Expr, float]:
    """Return (value, factor) behind views and a scalar factor that nobody else reads."""
    factor = 1.0
    for _ in range(3):
        expr = through_views(graph, expr, regroup)
        if not isinstance(expr, relax.Var) or graph.uses(expr) > 1:
            break
        expr, one = unscaled(graph, expr)
        factor *= one
    return expr, factor


def transposed(graph: Graph, expr: relax.Expr, layouts: dict[tuple[int, ...], str]) -> tuple[relax.Expr, str] | None:
    """Return (value, layout) where ``expr`` is a transposition nobody else reads, by its axes."""
    call = graph.call(expr, "relax.permute_dims")
    if call is None or call.attrs.axes is None or (isinstance(expr, relax.Var) and graph.uses(expr) > 1):
        return None
    rank = len(dims(expr) or ())
    layout = layouts.get(tuple(int(a) % rank for a in call.attrs.axes))
    return None if layout is None else (call.args[0], layout)


_KEYS = {(0, 1, 3, 2): "bhsd", (0, 2, 3, 1): "bshd", (0, 2, 1): "nsd"}


@dataclass(frozen=True)
class Product:
    """``scale * q k^T``; k as ``key_layout`` says (``bhds`` and ``nds``: handed over transposed)."""

    q: relax.Expr
    k: relax.Expr
    key_layout: str
    scale: float


def product_of(graph: Graph, expr: relax.Expr, regroup: bool) -> Product | None:
    """Return the scaled product of queries and keys that ``expr`` is."""
    value, scale = unscaled(graph, through(graph, expr, regroup=True))
    call = graph.call(_split(graph, value), "relax.matmul")
    rank = len(dims(call.args[0]) or ()) if call is not None else 0
    if call is None or rank not in (3, 4) or len(dims(call.args[1]) or ()) != rank:
        return None
    q, on_q = operand(graph, call.args[0], regroup)
    k, on_k = operand(graph, call.args[1], regroup)
    turned = transposed(graph, k, _KEYS)
    layout = "bhds" if len(dims(k) or ()) == 4 else "nds"
    if turned is not None:
        k, layout = turned
        k, again = operand(graph, k, regroup)
        on_k *= again
        # (batch * heads, seq, dim) transposed, then told apart
        layout = "bhsd" if layout == "nsd" and len(dims(k) or ()) == 4 else layout
    return Product(q, k, layout, scale * on_q * on_k)


def _split(graph: Graph, expr: relax.Expr) -> relax.Expr:
    """Return the (batch * heads, rows, columns) product that ``expr`` (batch, heads, rows, columns) is a view of."""
    expr = through(graph, expr)
    call = graph.call(expr, "relax.reshape")
    if call is None or len(dims(expr) or ()) != 4 or len(dims(call.args[0]) or ()) != 3:
        return expr
    apart, merged = dims(expr), dims(call.args[0])
    return through(graph, call.args[0]) if same_dims(apart[2:], merged[1:]) else expr  # type: ignore[index]


def repeated_heads(graph: Graph, expr: relax.Expr) -> tuple[relax.Expr, int] | None:
    """Return (k, n) where ``expr`` (batch, heads * n, seq, dim) repeats each head of k n times in place."""
    if (call := graph.call(expr, "relax.repeat")) is not None:
        axis = call.attrs.axis
        if axis is not None and int(axis) % 4 == 1 and len(dims(call.args[0]) or ()) == 4:
            return call.args[0], int(call.attrs.repeats)
        return None
    if (outer := graph.call(expr, "relax.reshape")) is None:
        return None
    if (wide := graph.call(outer.args[0], "relax.broadcast_to")) is None:
        return None
    narrow = graph.call(wide.args[0], "relax.expand_dims", "relax.reshape")
    if narrow is None:
        return None
    source = narrow.args[0]
    before, middle, after = dims(source), dims(wide), dims(expr)
    one, thin = sizes(wide.args[0]), dims(wide.args[0])
    if before is None or middle is None or after is None or thin is None or one is None:
        return None
    if len(before) != 4 or len(middle) != 5 or len(after) != 4 or one[2] != 1:
        return None
    # The new axis must stand behind the heads, or reshape would tile instead of repeat.
    kept = same_dims(before, [*thin[:2], *thin[3:]]) and same_dims(before, [*middle[:2], *middle[3:]])
    heads, times, total = sizes(source)[1], sizes(wide)[2], sizes(expr)[1]  # type: ignore[index]
    if not kept or None in (heads, times, total) or heads * times != total:  # type: ignore[operator]
        return None
    if not same_dims([after[0], *after[2:]], [before[0], *before[2:]]):
        return None
    return source, int(times)  # type: ignore[arg-type]
