"""What a fused linear kernel is called with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import relax

from crossloom.schedules.fused_linear import Plan, Spec, pack_bias, pack_weights

from .linear import Region


def linear_operands(
    builder: relax.BlockBuilder,
    region: Region,
    outer: Callable[[relax.Expr], relax.Expr],
    spec: Spec,
    cut: Plan,
    norm: Sequence[relax.Expr],
    weights: Sequence[tuple[relax.Expr, str]],
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
    """
    operands = [
        outer(region.x),
        *norm,
        *(outer(e) for e in region.turn),
        pack_weights(builder, spec, cut, weights),
    ]
    if spec.bias:
        biases = [(None if b is None else outer(b), count) for b, count in region.biases]
        operands.append(pack_bias(builder, spec, cut, biases))
    return operands + [outer(e) for e in region.extras]
