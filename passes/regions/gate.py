"""Read a gate: vectors times numbers of their rows, which are made of sums of products of vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import relax, tirx

from crossloom.rewrite import Graph
from crossloom.schedules.semantic_gate import Apply, Dot, Gate, Operand, Result, Scalar

from ..matching.spelling import dims, dtype, extents, number, same_dims
from .columns import FLOATS, NoKernel
from .vectors import GateReader, Key, RowNumber, Vector, widened

#: The composite's name.
GATE_REGION = "crossloom.fused_gate"


@dataclass(frozen=True)
class GateRegion:
    """What a region computes, and its operands in the kernel's order."""

    spec: Gate
    operands: tuple[relax.Expr, ...]


def read_gate(graph: Graph, members: frozenset[relax.Var], results: Sequence[relax.Expr], width: int) -> GateRegion:
    """Read the gate that some bindings make.

    Parameters
    ----------
    graph : Graph
    members : frozenset of relax.Var
    results : sequence of relax.Expr
        What is read outside.
    width : int
        Elements of a vector.

    Raises
    ------
    NoKernel
        Where it is something else.
    """
    reader = GateReader(graph, members, width)
    values = [reader.value(expr) for expr in results]
    vectors = [(e, v) for e, v in zip(results, values) if isinstance(v, Vector)]
    if width < 2 or not vectors:
        raise NoKernel("nothing that is gated")
    rows = tuple(number(d) for d in (dims(vectors[0][0]) or [])[:-1])
    kind = dtype(vectors[0][0])
    keys: list[Key] = []

    def place(key: Key) -> int:
        if key not in keys:
            keys.append(key)
        return keys.index(key)

    def placed(value: Scalar) -> Scalar:
        if isinstance(value, Dot):
            return Dot(place(value.left), place(value.right))
        return Apply(value.name, tuple(map(placed, value.args))) if isinstance(value, Apply) else value

    out: list[Result] = []
    for expr, value in zip(results, values):
        value = widened(value, len(rows))
        shape = extents(expr)
        tail = [1] * value.units if isinstance(value, RowNumber) else [width]
        if dtype(expr) != kind or value.rank != len(rows) or not same_dims(shape, [*rows, *tail]):
            raise NoKernel("results of different rows or types")
        if isinstance(value, Vector) and not value.behind and not value.absolute:
            out.append(Result(tuple((place(key), placed(f)) for key, f in value.terms)))
        elif isinstance(value, RowNumber):
            out.append(Result((), placed(value.value), value.units))
        else:
            raise NoKernel("a result that is no vector")
    operands, exprs = [], []
    for key in keys:
        expr = reader.operands[key.place]
        if dtype(expr) != kind:
            raise NoKernel("operands of different types")
        exprs.append(expr)
        operands.append(_operand(expr, key, rows))
    if any(dtype(expr) != kind for expr in reader.given) or kind not in FLOATS:
        raise NoKernel("operands of different types")
    given = tuple(len(dims(expr) or ()) for expr in reader.given)
    spec = Gate(rows, width, kind, tuple(operands), given, tuple(out))
    return GateRegion(spec, (*exprs, *reader.given))


def _operand(expr: relax.Expr, key: Key, rows: Sequence[int | tirx.Expr]) -> Operand:
    shape = extents(expr)
    follows: list[int | None] = [None] * (len(shape) - 1)
    for axis, own in enumerate(key.axes):
        if own is not None:
            follows[own] = axis
    if any(f is None and shape[i] != 1 for i, f in enumerate(follows)):
        raise NoKernel("an operand whose rows are summed away")
    if any(f is not None and not same_dims([shape[i]], [rows[f]]) for i, f in enumerate(follows)):
        raise NoKernel("an operand of other rows")
    return Operand(tuple(shape), tuple(follows))
