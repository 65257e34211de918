"""Read a ``crossloom.fused_append`` region: values joined along an axis, each a result."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import relax

from crossloom.rewrite import Graph
from crossloom.schedules.join import Join

from ..matching.spelling import dims, dtype, fields_of, number, results_of
from .linear import NoKernel

#: The composite's name.
APPEND_REGION = "crossloom.fused_append"


@dataclass(frozen=True)
class AppendRegion:
    """What a region joins; ``parts`` are its operands in the kernel's order."""

    joins: tuple[Join, ...]
    parts: tuple[relax.Expr, ...]


def read_append(graph: Graph) -> AppendRegion:
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
    joins, parts = [], []
    for result in results_of(graph):
        call = graph.call(result, "relax.concat")
        if call is None:
            raise NoKernel(f"{getattr(result, 'name', '')}: a result that is not joined")
        given = fields_of(graph, call.args[0])
        shapes = [dims(part) for part in given]
        if not given or call.attrs.axis is None or any(not shape for shape in shapes):
            raise NoKernel("a join of values of unknown shape, or of none")
        axis = int(call.attrs.axis) % len(shapes[0] or ())
        joins.append(Join(tuple(tuple(map(number, shape or ())) for shape in shapes), axis, dtype(result)))
        parts += given
    return AppendRegion(tuple(joins), tuple(parts))
