"""Read a ``crossloom.fused_linear`` region: norm, linear layers, and what is done to their columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import relax

from crossloom.rewrite import Graph, Match, region_of, unknown_size
from crossloom.schedules.fused_linear import Spec
from crossloom.verdict import Verdict, accept, refuse

from ..matching.spelling import dtype
from .columns import Columns, NoKernel, output_of, turn_of
from .reader import ACTIVATIONS, LINEAR_REGION, MOVES, Reader

__all__ = ["ACTIVATIONS", "LINEAR_REGION", "MOVES", "NoKernel", "Region", "kernel_takes", "read_layer", "read_linear"]


@dataclass(frozen=True)
class Region:
    """What a region computes, and which of its parameters the kernel takes for what.

    Attributes
    ----------
    spec : Spec
    x : relax.Var
    norm : tuple of relax.Var
        Weight and bias, those that are there.
    turn : tuple of relax.Expr
        cos and sin of a rotation of x.
    weights : tuple of (relax.Expr, layout)
    biases : tuple of (relax.Expr or None, number of columns)
    extras : tuple of relax.Expr
        Norm operands, tables and residuals of the outputs in the kernel's order.
    """

    spec: Spec
    x: relax.Expr
    norm: tuple[relax.Expr, ...]
    turn: tuple[relax.Expr, ...]
    weights: tuple[tuple[relax.Expr, str], ...]
    biases: tuple[tuple[relax.Expr | None, int], ...]
    extras: tuple[relax.Expr, ...]


def read_linear(graph: Graph) -> Region:
    """Read the body of a region.

    Parameters
    ----------
    graph : Graph
        Of the region's function.

    Raises
    ------
    NoKernel
        Where the kernel cannot do what the region holds.
    """
    reader = Reader(graph)
    reader.read()
    return _assembled(reader, reader.results())


def read_layer(graph: Graph, var: relax.Var) -> Region:
    """Read one linear layer that a binding calls, in terms of the function that it is in; raises as a region does."""
    reader = Reader(graph)
    reader.step(var)
    columns = reader.columns(var)
    return _assembled(reader, [] if columns is None else [columns])


def _assembled(reader: Reader, results: Sequence[Columns]) -> Region:
    rows = reader.rows
    if rows is None:
        raise NoKernel("no linear layer in the region")
    *leading, depth = reader.sizes_of_rows(rows)
    outputs, extras = [], []
    for value in results:
        if value.dtype != dtype(rows.x):
            raise NoKernel(f"a result of type {value.dtype} of values of type {dtype(rows.x)}")
        output, more = output_of(value)
        outputs.append(output)
        extras += more
    biased = any(bias is not None for bias, _ in reader.biases)
    turn = None if rows.turn is None else turn_of(rows.turn)
    spec = Spec(tuple(leading), depth, dtype(rows.x), tuple(outputs), rows.norm, biased, turn)
    biases = tuple(reader.biases) if biased else ()
    tables = () if rows.turn is None else (rows.turn.cos.operand, rows.turn.sin.operand)
    return Region(spec, rows.x, rows.operands, tables, tuple(reader.weights), biases, tuple(extras))


def kernel_takes(match: Match, region: str = LINEAR_REGION, read: Callable[[Graph], object] = read_linear) -> Verdict:
    """Refuse a group that no kernel could compute: a ``legal`` for rules that form or grow regions.

    Parameters
    ----------
    match : Match
    region : str
        The composite that the group would become.
    read : callable
        Its reader, which raises :class:`NoKernel`.
    """
    if (size := unknown_size(match)) is not None:
        return refuse("dimension-not-among-operands", str(size), "the region could not know this size")
    func = region_of(match, region)
    try:
        read(Graph(match.graph.name, func, match.graph.mod))
    except NoKernel as problem:
        return refuse("no-kernel", match.root.name, str(problem))
    return accept()
