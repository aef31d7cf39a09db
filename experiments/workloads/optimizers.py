"""Optimizers and learning rates of a training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ...compress import WorkerMomentum, compressor, without_momentum
from ...compress.algorithms.dgc import DGC
from ...compress.protocol.compressor import inside
from .muon import Muon

OptimizerName: TypeAlias = Literal["adamw", "sgd", "muon"]
RATES: dict[OptimizerName, float] = {"sgd": 0.1, "adamw": 0.003, "muon": 0.005}  # with which the default GPT trains
BLOCKS = "blocks."  # in the names of parameters of a GPT's blocks


def optimizers_for(model: nn.Module, spec: str, name: OptimizerName, lr: float, momentum: float) -> list[Optimizer]:
    """Return the optimizers of a model; without their momentum where the compressor `spec` has that.

    `muon` is for the matrices of a GPT's blocks, and AdamW beside it for all other parameters. `momentum` is sgd's.
    """
    optimizers: list[Optimizer]
    if name == "sgd":
        optimizers = [SGD(model.parameters(), lr=lr, momentum=momentum)]
    elif name == "adamw":
        optimizers = [AdamW(model.parameters(), lr=lr)]
    else:
        named = [(BLOCKS in path and each.dim() == 2, each) for path, each in model.named_parameters()]
        matrices, others = ([each for in_block, each in named if in_block == wanted] for wanted in (True, False))
        optimizers = [Muon(matrices, lr), AdamW(others, lr=lr)]
    theirs = any(isinstance(each, WorkerMomentum | DGC) and each.momentum for each in inside(compressor(spec)))
    return without_momentum(optimizers) if theirs else optimizers


def schedule_for(optimizer: Optimizer, name: str, warmup: int, steps: int) -> LambdaLR:
    """The learning rate of so many steps: a linear warm-up, then `constant`, or `cosine` down to zero."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / (steps - warmup)
        return 1.0 if name == "constant" else (1 + math.cos(math.pi * done)) / 2

    return LambdaLR(optimizer, factor)


def update(optimizers: Sequence[Optimizer], schedules: Sequence[LambdaLR]) -> None:
    """Update the model and the learning rates, and drop the gradients."""
    for optimizer, schedule in zip(optimizers, schedules, strict=True):
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
