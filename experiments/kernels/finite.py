"""The search for numbers that are not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import kernels
from .job import Job, Output


class AllFinite(Job):
    """Whether all numbers of a bucket are finite."""

    baseline = "sum().isfinite()"

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.grad = torch.zeros(elements, dtype=dtype, device=device)
        self.answer = torch.zeros((), dtype=torch.bool, device=device)
        super().__init__([self.grad], [])

    @property
    def floor_bytes(self) -> float:
        """One read."""
        return self.grad.nbytes

    def run(self) -> None:
        """As every step with error feedback asks."""
        self.answer = kernels.all_finite(self.grad)

    def run_baseline(self) -> None:
        """The fast way, although a sum of finite numbers may overflow; `isfinite().all()` takes ten times as long."""
        self.answer = self.grad.sum(dtype=torch.float32).isfinite()

    def results(self) -> list[Output]:
        """The answer, and that to the same bucket with one infinite number."""
        answers: list[Tensor] = [self.answer]
        self.grad[self.grad.numel() // 3] = torch.inf
        answers.append(kernels.all_finite(self.grad))
        return [Output("answers", torch.stack(answers), exact=True)]
