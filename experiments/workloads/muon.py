"""Muon (Jordan 2024) in the precision of its parameters, which CPUs without bfloat16 arithmetic need."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of a, b, c in Jordan's Newton-Schulz iteration
ITERATIONS = 5
TINIEST = 1e-7  # a norm to divide by


class Muon(Optimizer):
    """Update matrices by their momentum with all singular values made nearly equal.

    It is `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, but computes in the matrices' dtype. torch takes
    bfloat16, whose products are slow on CPUs without instructions for it.
    """

    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.1
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "nesterov": True, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no training here has a closure
        """Update all matrices that have a gradient."""
        for group in self.param_groups:
            for matrix in (each for each in group["params"] if each.grad is not None):
                momentum = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 1 - group["momentum"])
                direction = matrix.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(orthonormalized(direction), alpha=-0.2 * math.sqrt(max(matrix.shape)) * group["lr"])


def orthonormalized(matrix: Tensor) -> Tensor:
    """Return a matrix with the same singular vectors, and singular values of about 1."""
    wide = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    a, b, c = COEFFICIENTS
    result: Tensor = wide / wide.norm().clamp(min=TINIEST)
    for _ in range(ITERATIONS):
        gram = result @ result.mT
        result = torch.addmm(result, torch.addmm(gram, gram, gram, beta=b, alpha=c), result, beta=a)
    found: Tensor = result.mT if wide is not matrix else result
    return found
