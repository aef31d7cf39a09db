"""Measurements of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.distributed as dist

from ...compress import AllReduce
from ...ddp_core import ask, over

Steps: TypeAlias = Sequence[tuple[int, float, float]]  # number, mean loss over ranks, seconds of training at its end


@dataclass
class History:
    """Measurements so far: this rank's `losses`, and `mean_losses` over ranks up to the last look."""

    losses: list[float] = field(default_factory=list)
    mean_losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    train_seconds: list[float] = field(default_factory=list)

    def add(self, loss: float, seconds: float) -> None:
        """A step has ended."""
        self.losses.append(loss)
        self.step_seconds.append(seconds)
        self.train_seconds.append(seconds + (self.train_seconds[-1] if self.train_seconds else 0.0))

    def look(self, group: dist.ProcessGroup, device: torch.device) -> Steps:
        """The steps since the last look. A collective call."""
        new = torch.tensor(self.losses[len(self.mean_losses) :], device=device)
        return self.look_at(ask(AllReduce(new), over(group)).tolist())

    def look_at(self, mean_losses: Sequence[float]) -> Steps:
        """The steps since the last look, whose mean losses over ranks these are."""
        first = len(self.mean_losses)
        self.mean_losses += mean_losses
        numbers = range(first + 1, len(self.losses) + 1)
        return list(zip(numbers, self.mean_losses[first:], self.train_seconds[first:], strict=True))
