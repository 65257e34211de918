"""Reading a graph spelling by spelling, and outlining what was read exactly as it was written.

A composite's body replays the matched bindings, so casts, order and rounding stay those of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import ml_dtypes  # noqa: F401  (numpy learns bfloat16)
from tvm import relax, tirx

from crossloom.rewrite import Graph, Match, Site, outline, rebuild
from crossloom.rewrite.composite import Attr
from crossloom.rewrite.sizes import dimensions, in_terms_of, is_size, same_size, sizes_in, translate
from crossloom.verdict import Verdict, accept, refuse


def is_constant(expr: relax.Expr) -> bool:
    """Return whether an expression is a tensor constant."""
    return hasattr(getattr(expr, "value", None), "numpy")


def scalar(graph: Graph, expr: relax.Expr) -> float | None:
    """Return the value of a one-element constant (casts of it included), None for anything else."""
    value = graph.resolve(expr)
    casts: list[str] = []
    while isinstance(value, relax.Call) and graph.op(value) in ("relax.astype", "relax.reshape", "relax.broadcast_to"):
        if graph.op(value) == "relax.astype":
            casts.append(dtype(value))
        value = graph.resolve(value.args[0])
    if not is_constant(value) or value.value.numpy().size != 1:
        return None
    array = value.value.numpy().reshape(())
    for kind in reversed(casts):
        array = array.astype(kind)
    return float(array)


def dims(expr: relax.Expr) -> list[tirx.Expr] | None:
    """Return the dimensions of a tensor of known shape."""
    ty = expr.ty
    known = isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr)
    return dimensions(expr) if known else None


def number(extent: tirx.Expr | int) -> tirx.Expr | int:
    """Return an extent as a Python number where it is one."""
    return int(extent) if isinstance(extent, (int, tirx.IntImm)) else extent


def extents(expr: relax.Expr) -> list[int | tirx.Expr]:
    """Return the dimensions of a tensor, as numbers where they are; none where its shape is unknown."""
    return [number(d) for d in dims(expr) or ()]


def sizes(expr: relax.Expr) -> list[int | None] | None:
    """Return the dimensions as integers, None for symbolic ones."""
    shape = dims(expr)
    return None if shape is None else [int(d) if isinstance(d, (int, tirx.IntImm)) else None for d in shape]


def same_dims(a: Sequence[tirx.Expr], b: Sequence[tirx.Expr]) -> bool:
    """Return whether two shapes are proved equal."""
    return len(a) == len(b) and all(same_size(x, y) for x, y in zip(a, b))


def dtype(expr: relax.Expr) -> str:
    """Return the element type as text."""
    return str(expr.ty.dtype) if isinstance(expr.ty, relax.TensorType) else ""


def either(call: relax.Call) -> Iterator[tuple[relax.Expr, relax.Expr]]:
    """Yield a commutative call's operands in both orders."""
    yield call.args[0], call.args[1]
    yield call.args[1], call.args[0]


def uncast(graph: Graph, expr: relax.Expr) -> relax.Expr:
    """Return what a cast between floats was made from."""
    call = graph.call(expr, "relax.astype")
    return call.args[0] if call is not None and only_rounds(call) else expr


def only_rounds(cast: relax.Call) -> bool:
    """Return whether a cast leads from floats to floats: one through integers or booleans computes something."""
    return all("float" in dtype(side) for side in (cast.args[0], cast))


def fields_of(graph: Graph, expr: relax.Expr) -> list[relax.Expr]:
    """Return the fields of a tuple that is written out in the function, none for any other value."""
    return list(getattr(graph.resolve(expr), "fields", ()))


def results_of(graph: Graph) -> list[relax.Expr]:
    """Return what a function returns; the fields of a tuple one by one."""
    body = graph.func.body.body
    whole = graph.resolve(body)
    return list(whole.fields) if isinstance(whole, relax.Tuple) else [body]


def first_name(graph: Graph, expr: relax.Expr) -> relax.Expr:
    """Return the name under which a value is made, where ``expr`` is another one of it."""
    while isinstance(expr, relax.Var) and isinstance(value := graph.value.get(expr), relax.Var):
        expr = value
    return expr


def is_weight(graph: Graph, expr: relax.Expr) -> bool:
    """Return whether a value is a constant or a parameter behind the inputs (all, where ``num_input`` is absent)."""
    value = graph.resolve(expr)
    return value in graph.weights if isinstance(value, relax.Var) else is_constant(value)


def interior(graph: Graph, root: relax.Var, stops: Sequence[relax.Expr]) -> frozenset[relax.Var]:
    """Return the bindings between the root and the captures, the root included."""
    ends = {e for e in stops if isinstance(e, relax.Var)}
    found, stack = {root}, [root]
    while stack:
        value = graph.value[stack.pop()]
        leaves: list[relax.Expr] = [value]
        while leaves:
            leaf = leaves.pop()
            if isinstance(leaf, relax.Call):
                leaves.extend(leaf.args)
            elif isinstance(leaf, relax.Tuple):
                leaves.extend(leaf.fields)
            elif isinstance(leaf, relax.TupleGetItem):
                leaves.append(leaf.tuple_value)
            elif isinstance(leaf, relax.Var) and leaf in graph.value and leaf not in ends and leaf not in found:
                found.add(leaf)
                stack.append(leaf)
    return frozenset(found)


def matched(graph: Graph, root: relax.Var, captures: Mapping[str, relax.Expr], **facts: object) -> Match:
    """Return a match whose interior is everything between root and captures."""
    return Match(graph, root, dict(captures), interior(graph, root, list(captures.values())), dict(facts))


def replayable(match: Match) -> Verdict:
    """Refuse where the body would need something that the captures do not carry."""
    known = [(d, d) for e in match.captures.values() for d in dims(e) or ()]
    captured = {e for e in match.captures.values() if isinstance(e, relax.Var)}
    for var in match.interior:
        leaves = match.graph.leaves[var]
        for dim in sizes_in(leaves):
            if translate(dim, known) is None:
                return refuse("dimension-not-among-operands", str(dim), "the composite could not know this size")
        for leaf in leaves:
            if isinstance(leaf, relax.Var) and not is_size(leaf):
                if leaf not in captured and leaf not in match.interior:
                    return refuse("operand-not-captured", leaf.name)
    return accept()


def replay(site: Site, name: str, attrs: Mapping[str, Attr] | None = None) -> relax.Call:
    """Outline a match into a composite whose body is the matched bindings, in their order."""
    match = site.match
    graph = match.graph
    inputs = {key: site[key] for key in match.captures}

    def body(builder: relax.BlockBuilder, **params: relax.Var) -> relax.Expr:
        known = [
            (old, new)
            for key, param in params.items()
            for old, new in zip(dims(match.captures[key]) or (), dims(param) or ())
        ]
        # Two captures can be the same value; the first parameter stands for it.
        env: dict[relax.Expr, relax.Expr] = {}
        for key, param in params.items():
            if isinstance(match.captures[key], relax.Var):
                env.setdefault(match.captures[key], param)

        inner = in_terms_of(env, known)

        def renew(expr: relax.Expr) -> relax.Expr:
            # A constant may be captured, too.
            key = next((key for key, captured in match.captures.items() if expr.same_as(captured)), None)
            return inner(expr) if key is None else params[key]

        for var in sorted(match.interior, key=graph.position.__getitem__):
            if not var.same_as(match.root):
                env[var] = builder.emit(rebuild(graph.value[var], renew))
        return rebuild(graph.value[match.root], renew)

    return outline(site, name, inputs, body, attrs)
