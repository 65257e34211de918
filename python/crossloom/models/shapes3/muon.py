"""Muon, the optimizer that trains the matrices of shapes3.

``torch.optim.Muon`` orthogonalises in bfloat16, one matrix after the other:
1.6 s a step on a CPU without bfloat16 units. This one works in float32 on all
matrices of one shape at once, 0.06 s a step on the same two cores.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonalize(updates: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices, roughly: singular values near 1.

    Parameters
    ----------
    updates : Tensor
        ``(n, rows, columns)`` float32 with ``rows <= columns``.
    steps : int
        Newton-Schulz iterations of the quintic ``a x + b x^3 + c x^5``, with
        the coefficients of Jordan et al., "Muon" (2024).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = updates / (updates.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised, for parameters of two dimensions.

    Parameters
    ----------
    params : iterable of nn.Parameter
        Matrices; embeddings, vectors and filters belong to AdamW.
    lr : float
        As for AdamW: an update's root mean square is ``scale * lr`` for a
        matrix of any shape (Liu et al., "Muon is Scalable for LLM Training",
        2025, match AdamW's with 0.2).
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.05,
        scale: float = 0.5,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "scale": scale})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 1.0 - group["momentum"])
                update = torch.lerp(parameter.grad, mean, group["momentum"])
                alike.setdefault(update.shape, []).append((parameter, update))
            for (rows, columns), members in alike.items():
                stacked = torch.stack([update for _, update in members])
                tall = rows > columns
                turned = orthogonalize(stacked.mT if tall else stacked)
                rate = group["scale"] * group["lr"] * math.sqrt(max(rows, columns))
                for (parameter, _), update in zip(members, turned.mT if tall else turned, strict=True):
                    parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                    parameter.sub_(update, alpha=rate)
