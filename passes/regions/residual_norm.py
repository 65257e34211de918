"""Read a ``crossloom.fused_residual_norm`` region: a sum and norms of it, or norms of a value that is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import relax, tirx

from crossloom.rewrite import Graph, composite_attrs, composite_name
from crossloom.schedules.fused_linear import Norm
from crossloom.schedules.residual_norm import Follows, ResidualNorm

from ..matching.spelling import dims, dtype, first_name, number, results_of, same_dims, sizes
from .columns import FLOATS, NoKernel

#: The composite's name.
RESIDUAL_NORM_REGION = "crossloom.fused_residual_norm"
#: Composites that are a norm.
NORMS = frozenset({"crossloom.rms_norm", "crossloom.layer_norm"})


@dataclass(frozen=True)
class ResidualNormRegion:
    """What a region computes, and which of its parameters the kernel takes for what.

    Attributes
    ----------
    spec : ResidualNorm
    terms : tuple of relax.Expr
        The operands of the sum; or the value that is normed.
    weights : tuple of relax.Expr
        Weight and bias of each norm, those that are there, in the kernel's order; ``(depth,)`` behind axes of size 1.
    """

    spec: ResidualNorm
    terms: tuple[relax.Expr, ...]
    weights: tuple[relax.Expr, ...]


def _follows(operand: relax.Expr, shape: Sequence[tirx.Expr]) -> Follows:
    """Return which axis of the sum each dimension of an operand follows."""
    own = dims(operand)
    if own is None:
        raise NoKernel("a sum of a value of unknown shape")
    axes = range(len(shape) - len(own), len(shape))
    for axis, extent in zip(axes, own):
        if number(extent) != 1 and not same_dims([extent], [shape[axis]]):
            raise NoKernel("a sum of values whose sizes are not known to fit")
    return tuple(None if number(extent) == 1 else axis for axis, extent in zip(axes, own))


def _norm(graph: Graph, var: relax.Var, depth: int, allowed: set[str]) -> tuple[Norm, list[relax.Expr]]:
    """Return a norm and its operands behind x; ``allowed`` are the types of these and of its result."""
    callee = graph.callee(var)
    if callee is None or composite_name(callee) not in NORMS:
        raise NoKernel(f"{var.name}: not a norm")
    attrs = composite_attrs(callee)
    parts = graph.operands(var)
    operands = [parts[name] for name in ("weight", "bias") if name in parts]
    if [int(axis) for axis in attrs["axes"]] != [-1]:  # type: ignore[attr-defined]
        raise NoKernel(f"{var.name}: a norm over more than the last axis")
    kinds = {dtype(operand) for operand in operands}
    if len(kinds) > 1 or not kinds | {dtype(var)} <= allowed:
        raise NoKernel(f"{var.name}: a weight or a result of a type that is neither x's nor the statistics'")
    for operand in operands:
        shape = sizes(operand) or [None]
        if shape[-1] != depth or any(size != 1 for size in shape[:-1]):
            raise NoKernel(f"{var.name}: a weight or bias that is not one value per place in the row")
    name = "rms" if composite_name(callee) == "crossloom.rms_norm" else "layer"
    epsilon = float(attrs["epsilon"])  # type: ignore[arg-type]
    return Norm(name, epsilon, "weight" in parts, "bias" in parts, *kinds), operands


def _uncast(graph: Graph, expr: relax.Expr) -> relax.Expr:
    """Return what a result was rounded from."""
    call = graph.call(expr, "relax.astype")
    return expr if call is None else first_name(graph, call.args[0])


def _normed(graph: Graph) -> tuple[relax.Expr, tuple[relax.Expr, ...]]:
    """Return what is normed and the terms of the sum that it is; itself where there is no sum in the region."""
    for var in graph.order:
        if (call := graph.call(var, "relax.add")) is not None:
            return first_name(graph, var), tuple(call.args)
    calls = (graph.value[var] for var in graph.order if graph.callee(var) is not None)
    first = next((call for call in calls if isinstance(call, relax.Call)), None)
    if first is None:
        raise NoKernel("neither a sum nor a norm in the region")
    given = first_name(graph, first.args[0])
    if given in graph.value:
        raise NoKernel(f"{getattr(given, 'name', '')}: a norm of a value made in the region")
    return given, (given,)


def read_residual_norm(graph: Graph) -> ResidualNormRegion:
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
    total, terms = _normed(graph)
    name, shape, kind = getattr(total, "name", ""), dims(total), dtype(total)
    depth = number(shape[-1]) if shape else None
    if shape is None or not isinstance(depth, int) or depth == 0:
        raise NoKernel(f"{name}: rows of unknown or no length")
    if kind not in FLOATS or {dtype(term) for term in terms} != {kind}:
        raise NoKernel(f"{name}: a norm of values of type {kind}")
    rows = tuple(number(extent) for extent in shape[:-1])
    if any(not isinstance(extent, (int, tirx.Var)) for extent in rows):
        raise NoKernel(f"{name}: rows of a composed size")
    results = [first_name(graph, result) for result in results_of(graph)]
    keeps_sum = len(terms) > 1 and bool(results) and results[0].same_as(total)
    norms, weights, types = [], [], []
    statistics = "float64" if kind == "float64" else "float32"
    for result in results[1:] if keeps_sum else results:
        var = _uncast(graph, result)
        call = graph.value.get(var) if isinstance(var, relax.Var) else None
        if not isinstance(call, relax.Call) or not call.args or not first_name(graph, call.args[0]).same_as(total):
            raise NoKernel(f"{getattr(var, 'name', '')}: a result that is no norm of {name}")
        norm, operands = _norm(graph, var, depth, {kind, statistics})
        if dtype(result) not in (kind, statistics):
            raise NoKernel(f"{var.name}: a norm that is cast to {dtype(result)}")
        norms.append(norm)
        types.append(dtype(result))
        weights += operands
    if not norms:
        raise NoKernel("no norm in the region")
    follows = tuple(_follows(term, shape) for term in terms)
    spec = ResidualNorm(rows, depth, kind, follows, tuple(norms), keeps_sum, tuple(types))
    return ResidualNormRegion(spec, terms, tuple(weights))
