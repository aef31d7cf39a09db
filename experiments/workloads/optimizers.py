"""Optimizers and learning rates of a training."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


def optimizer_for(model: nn.Module, name: str, lr: float, momentum: float) -> torch.optim.Optimizer:
    """`adamw`, or `sgd` with momentum."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    return torch.optim.AdamW(model.parameters(), lr=lr)


def schedule_for(optimizer: torch.optim.Optimizer, name: str, warmup: int, steps: int) -> LambdaLR:
    """The learning rate of so many steps: a linear warm-up, then `constant`, or `cosine` down to zero."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / (steps - warmup)
        return 1.0 if name == "constant" else (1 + math.cos(math.pi * done)) / 2

    return LambdaLR(optimizer, factor)
