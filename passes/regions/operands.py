"""What a fused linear kernel is called with; its norm goes into the weights behind it where they are constant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm import relax

from crossloom.rewrite import Match, Site
from crossloom.schedules.fused_linear import Norm, Plan, Spec, pack_bias, pack_weights

from ..matching.spelling import is_weight, uncast
from .linear import Region

#: From an operand as a region names it to what is handed over.
Outer = Callable[[relax.Expr], relax.Expr]


@dataclass(frozen=True)
class Layers:
    """Linear layers side by side, in terms of the caller.

    Attributes
    ----------
    spec : Spec
    norm : tuple of relax.Expr
        Weight and bias of the norm in front, those that the kernel takes.
    weights : tuple of (relax.Expr, layout)
    biases : tuple of (relax.Expr or None, number of columns)
        None at all where the kernel takes none.
    """

    spec: Spec
    norm: tuple[relax.Expr, ...]
    weights: tuple[tuple[relax.Expr, str], ...]
    biases: tuple[tuple[relax.Expr | None, int], ...]


def layers_of(region: Region, outer: Outer) -> Layers:
    """Return a region's layers as they are."""
    biases = tuple((bias if bias is None else outer(bias), count) for bias, count in region.biases)
    weights = tuple((outer(weight), layout) for weight, layout in region.weights)
    return Layers(region.spec, tuple(map(outer, region.norm)), weights, biases)


def norm_folded(site: Site, region: Region, outer: Outer) -> Layers:
    """Return a region's layers, the norm in front of them put into constant weights once and for all.

    Notes
    -----
    Of ``norm(x) W`` with ``norm(x) = (x - mean(x)) f g + b`` a factor f of each row is left: W becomes ``g W``, each
    column less its mean, since ``(x - mean(x)) W = x (W - mean(W))``, and the bias becomes ``b W + bias``.  An RMS
    norm has no mean.  As in SliceGPT (Ashkboos et al. 2024).
    """
    layers, norm = layers_of(region, outer), region.spec.norm
    if norm is None or not _folds(site.match, region):
        return layers
    emit, given = site.builder.emit, dict(zip(_parts(norm), layers.norm))
    biases = list(layers.biases) or [(None, _columns(weight, layout)) for weight, layout in layers.weights]
    weights = []
    for i, (weight, layout) in enumerate(layers.weights):
        if "bias" in given:
            bias, count = biases[i]
            # No matrix product: that would be a linear layer to whoever reads the module next.
            added = emit(relax.op.sum(_scaled(site.builder, weight, layout, given["bias"]), _inputs(layout)))
            biases[i] = (added if bias is None else emit(relax.op.add(bias, added)), count)
        if "weight" in given:
            weight = _scaled(site.builder, weight, layout, given["weight"])
        if norm.kind == "layer":
            weight = _centred(site.builder, weight, layout, region.spec)
        weights.append((weight, layout))
    rest = Norm(norm.kind, norm.epsilon, centred=norm.kind == "layer")
    biased = region.spec.bias or "bias" in given
    spec = replace(region.spec, norm=rest, bias=biased)
    return Layers(spec, (), tuple(weights), tuple(biases) if biased else ())


def _parts(norm: Norm) -> list[str]:
    return [name for name in ("weight", "bias") if getattr(norm, name)]


def _columns(weight: relax.Expr, layout: str) -> int:
    return int(weight.ty.shape[0 if layout == "out_in" else 1])


def _inputs(layout: str) -> int:
    """Return the axis of a weight that its inputs are."""
    return 1 if layout == "out_in" else 0


def _scaled(builder: relax.BlockBuilder, weight: relax.Expr, layout: str, factor: relax.Expr) -> relax.Expr:
    """Return a weight whose inputs are multiplied by a factor each."""
    if layout == "in_out":
        factor = builder.emit(relax.op.expand_dims(factor, 1))
    return builder.emit(relax.op.multiply(weight, factor))


def _centred(builder: relax.BlockBuilder, weight: relax.Expr, layout: str, spec: Spec) -> relax.Expr:
    """Return a weight each column of which is less its mean."""
    total = builder.emit(relax.op.sum(weight, _inputs(layout), keepdims=True))
    mean = builder.emit(relax.op.multiply(total, relax.const(1.0 / spec.depth, spec.dtype)))
    return builder.emit(relax.op.subtract(weight, mean))


def _folds(match: Match, region: Region) -> bool:
    """Return whether a norm can be put into weights once and for all."""
    norm, spec = region.spec.norm, region.spec
    # An RMS norm without weight is a factor as it is.  Products of rounded weights would round twice in float16, and
    # a weight before a rotation is not one behind it.
    if norm is None or norm.scales_sums or spec.dtype == "float16" or spec.turn is not None:
        return False
    operands = (*region.norm, *(weight for weight, _ in region.weights))
    captured = (match.captures[e.name] if isinstance(e, relax.Var) else e for e in operands)
    return all(is_weight(match.graph, uncast(match.graph, expr)) for expr in captured)


def linear_operands(
    builder: relax.BlockBuilder, region: Region, outer: Outer, layers: Layers, cut: Plan, with_x: bool = True
) -> list[relax.Expr]:
    """Return the arguments of a fused linear kernel but its results, in its order.

    Parameters
    ----------
    builder : relax.BlockBuilder
        Emits what puts weights into the kernel's order.
    region : Region
    outer : callable
        From an operand as the region names it to what is handed over.
    layers : Layers
        The region's, as they are or with their norm folded.
    cut : Plan
        Of the kernel.
    with_x : bool
        Whether x is an argument; it is none where the kernel makes it.
    """
    spec = layers.spec
    operands = [
        *([outer(region.x)] if with_x else []),
        *layers.norm,
        *(outer(e) for e in region.turn),
        pack_weights(builder, spec, cut, layers.weights),
    ]
    if spec.bias:
        operands.append(pack_bias(builder, spec, cut, layers.biases))
    return operands + [outer(e) for e in region.extras]
