"""What the benchmark runs: a job has its buffers, the operations to time, and the same by torch's operators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .heavy_tail import HeavyTail, poison


@dataclass(frozen=True)
class Output:
    """What a run left behind; `exact`: the same bits from every implementation, not the same up to rounding."""

    name: str
    values: Tensor
    exact: bool = False


class Job(ABC):
    """Work on one bucket. `baseline` says how torch's operators do it."""

    baseline: ClassVar[str]

    def __init__(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self.inputs, self.outputs = inputs, outputs

    @property
    @abstractmethod
    def floor_bytes(self) -> float:
        """The fewest bytes that must move between memory and processor."""

    def refill(self, numbers: HeavyTail) -> None:
        """Fresh inputs, poisoned outputs: before each run."""
        for tensor in self.inputs:
            numbers.fill(tensor)
        for tensor in self.outputs:
            poison(tensor)

    @abstractmethod
    def run(self) -> None:
        """The job by the operations of `gradwire.kernels`."""

    @abstractmethod
    def run_baseline(self) -> None:
        """The job by torch's operators."""

    @abstractmethod
    def results(self) -> list[Output]:
        """What implementations must agree on, after a run."""


def inputs(elements: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A gradient and its residual, which has 32 bits."""
    return torch.zeros(elements, dtype=dtype, device=device), torch.zeros(elements, device=device)
