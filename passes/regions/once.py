"""Regions that equal layers call are read once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tvm import relax

from crossloom.rewrite import Graph, per_graph

from .columns import NoKernel

Found = TypeVar("Found")


def read_once(read: Callable[[Graph], Found]) -> Callable[[Graph, relax.Function], Found]:
    """Return a reader of the regions that a graph calls, which reads each of them once.

    Parameters
    ----------
    read : callable (Graph) -> Found
        Reads a region's body; raises :class:`NoKernel` where there is no kernel for it, and so does what is returned.
    """

    @per_graph
    def known(graph: Graph) -> dict[relax.Function, Found | NoKernel]:
        return {}

    def found(graph: Graph, callee: relax.Function) -> Found:
        regions = known(graph)
        if callee not in regions:
            try:
                regions[callee] = read(Graph(graph.name, callee, graph.mod))
            except NoKernel as problem:
                # Anew: a traceback holds the graph, which then would never go.
                regions[callee] = NoKernel(str(problem))
        region = regions[callee]
        if isinstance(region, NoKernel):
            raise NoKernel(str(region))
        return region

    return found
