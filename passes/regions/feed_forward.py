"""Read a ``crossloom.fused_feed_forward`` region: two linear regions, of which one takes what the other makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tvm import relax, tirx

from crossloom.rewrite import Graph, composite_name
from crossloom.schedules.feed_forward import FeedForward
from crossloom.schedules.fused_linear import Spec

from ..matching.spelling import extents, first_name, results_of
from .linear import LINEAR_REGION, NoKernel, Region, read_layer, read_linear
from .once import read_once

#: The composite's name.
FEED_FORWARD_REGION = "crossloom.fused_feed_forward"
#: What the layers behind the values between can be.
LAYERS = frozenset({"crossloom.linear", LINEAR_REGION})


@dataclass(frozen=True)
class FeedForwardRegion:
    """What a region computes, and which of its parameters the kernel takes for what.

    Attributes
    ----------
    spec : FeedForward
    first, second : Region
        In terms of the region's function; the second one's x is no parameter.
    """

    spec: FeedForward
    first: Region
    second: Region


def _in_terms_of(region: Region, values: Mapping[str, relax.Expr]) -> Region:
    """Return a region in terms of a function that calls it, given what its parameters are there."""

    def at(expr: relax.Expr) -> relax.Expr:
        return values[expr.name] if isinstance(expr, relax.Var) else expr

    x = at(region.x)
    return Region(
        replace(region.spec, rows=tuple(extents(x)[:-1])),
        x,
        tuple(map(at, region.norm)),
        tuple(map(at, region.turn)),
        tuple((at(weight), layout) for weight, layout in region.weights),
        tuple((None if bias is None else at(bias), count) for bias, count in region.biases),
        tuple(map(at, region.extras)),
    )


_read_once = read_once(read_linear)


def layer_of(graph: Graph, var: relax.Var) -> Region:
    """Read a linear layer or a fused linear region that a binding calls, in terms of the graph.

    Raises
    ------
    NoKernel
        Where the kernel cannot do what it holds.
    """
    callee = graph.callee(var)
    if callee is None or composite_name(callee) != LINEAR_REGION:
        return read_layer(graph, var)
    return _in_terms_of(_read_once(graph, callee), graph.operands(var))


def read_pair(graph: Graph, hidden: relax.Var, result: relax.Var) -> FeedForwardRegion:
    """Read two layers that bindings call as one region.

    Parameters
    ----------
    graph : Graph
    hidden, result : relax.Var
        What the first layer makes, and what the second one makes of it.

    Raises
    ------
    NoKernel
        Where the kernel cannot do what they hold.
    """
    first, second = layer_of(graph, hidden), layer_of(graph, result)
    if not second.x.same_as(hidden):
        raise NoKernel(f"{result.name}: the layer takes {hidden.name}, but not as its x")
    if any(expr.same_as(hidden) for expr in (*second.norm, *second.extras, *(w for w, _ in second.weights))):
        raise NoKernel(f"{result.name}: the layer reads {hidden.name} as another operand too")
    if second.turn:
        raise NoKernel(f"{result.name}: a rotation between the layers")
    if not _are_rows(first.spec):
        raise NoKernel(f"{hidden.name}: not rows in the order of x, all their lanes behind each other")
    return FeedForwardRegion(FeedForward(first.spec, second.spec), first, second)


def _are_rows(spec: Spec) -> bool:
    """Return whether the result is one of rows in their order, then lanes."""
    output = spec.outputs[0]
    rows = [i for kind, i in output.dims if kind == "row"]
    wide = [i for i, extent in enumerate(spec.rows) if not (isinstance(extent, int) and extent == 1)]
    return len(spec.outputs) == 1 and not output.heads and [i for i in rows if i in wide] == wide == sorted(wide)


def read_feed_forward(graph: Graph) -> FeedForwardRegion:
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
    made = [var for var in graph.order if isinstance(graph.value[var], relax.Call)]
    if len(made) != 2 or graph.callee(made[0]) is None or graph.callee(made[1]) is None:
        raise NoKernel("other than two layers in the region")
    results = [first_name(graph, result) for result in results_of(graph)]
    if len(results) != 1 or not results[0].same_as(made[1]):
        raise NoKernel("the region's result is not what its second layer makes")
    found = read_pair(graph, *made)
    if any(not isinstance(n, (int, tirx.Var)) for n in (*found.spec.first.rows, *found.spec.second.rows)):
        raise NoKernel("rows of a composed size")
    return found
