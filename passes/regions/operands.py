"""What a fused linear kernel is called with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tvm import relax

from crossloom.rewrite import Match, Site
from crossloom.schedules.fused_linear import Norm, Plan, Spec, pack_bias, pack_weights

from ..matching.spelling import is_weight, uncast
from .linear import Region


def norm_folded(
    site: Site, region: Region, outer: Callable[[relax.Expr], relax.Expr]
) -> tuple[Spec, list[relax.Expr], list[tuple[relax.Expr, str]]]:
    """Return what a kernel computes, its norm's operands, and its weights with their layouts.

    The weight of an RMS norm is multiplied into constant weights once and for all; only a factor is left of the norm.
    Both are handed over already: in terms of the caller.
    """
    spec, norm = region.spec, [outer(e) for e in region.norm]
    weights = [(outer(w), layout) for w, layout in region.weights]
    if spec.norm is None or not _norm_folds(site.match, region):
        return spec, norm, weights
    weights = [(_scaled(site.builder, weight, layout, norm[0]), layout) for weight, layout in weights]
    return replace(spec, norm=Norm("rms", spec.norm.epsilon)), [], weights


def _norm_folds(match: Match, region: Region) -> bool:
    """Return whether an RMS norm's weight can be multiplied into weights once and for all."""
    norm = region.spec.norm
    if norm is None or norm.kind != "rms" or not norm.weight or norm.bias or region.spec.dtype == "float16":
        return False
    if region.spec.turn is not None:
        return False  # A weight before a rotation is not one behind it.
    operands = (*region.norm, *(weight for weight, _ in region.weights))
    captured = (match.captures[e.name] if isinstance(e, relax.Var) else e for e in operands)
    return all(is_weight(match.graph, uncast(match.graph, expr)) for expr in captured)


def _scaled(builder: relax.BlockBuilder, weight: relax.Expr, layout: str, factor: relax.Expr) -> relax.Expr:
    """Return a weight whose inputs are multiplied by a factor each."""
    if layout == "in_out":
        factor = builder.emit(relax.op.expand_dims(factor, 1))
    return builder.emit(relax.op.multiply(weight, factor))


def linear_operands(
    builder: relax.BlockBuilder,
    region: Region,
    outer: Callable[[relax.Expr], relax.Expr],
    spec: Spec,
    cut: Plan,
    norm: Sequence[relax.Expr],
    weights: Sequence[tuple[relax.Expr, str]],
    with_x: bool = True,
) -> list[relax.Expr]:
    """Return the arguments of a fused linear kernel but its results, in its order.

    Parameters
    ----------
    builder : relax.BlockBuilder
        Emits what puts weights into the kernel's order.
    region : Region
    outer : callable
        From an operand as the region names it to what is handed over.
    spec, cut : Spec, Plan
        Of the kernel.
    norm, weights
        The norm's operands and the weights with their layouts, handed over already.
    with_x : bool
        Whether x is an argument; it is none where the kernel makes it.
    """
    operands = [
        *([outer(region.x)] if with_x else []),
        *norm,
        *(outer(e) for e in region.turn),
        pack_weights(builder, spec, cut, weights),
    ]
    if spec.bias:
        biases = [(None if b is None else outer(b), count) for b, count in region.biases]
        operands.append(pack_bias(builder, spec, cut, biases))
    return operands + [outer(e) for e in region.extras]
