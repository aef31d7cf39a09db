"""Optimizers and learning rates of a training."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ...compress import WorkerMomentum, compressor, without_momentum
from ...compress.algorithms.dgc import DGC
from ...compress.protocol.compressor import inside


def optimizer_for(model: nn.Module, spec: str, name: str, lr: float, momentum: float) -> torch.optim.Optimizer:
    """`adamw`, or `sgd` with momentum; without its momentum where the compressor `spec` has that."""
    optimizer: torch.optim.Optimizer
    if name == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    theirs = any(isinstance(each, WorkerMomentum | DGC) and each.momentum for each in inside(compressor(spec)))
    return without_momentum(optimizer) if theirs else optimizer


def schedule_for(optimizer: torch.optim.Optimizer, name: str, warmup: int, steps: int) -> LambdaLR:
    """The learning rate of so many steps: a linear warm-up, then `constant`, or `cosine` down to zero."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / (steps - warmup)
        return 1.0 if name == "constant" else (1 + math.cos(math.pi * done)) / 2

    return LambdaLR(optimizer, factor)
