"""Jobs of top-k: the choice of the largest elements, and the mean of several ranks' choices."""

from __future__ import annotations

import math

import torch

from ... import kernels
from ...kernels import Residual
from .heavy_tail import HeavyTail
from .job import Job, Output, inputs

RATIO = 0.01
SPARSE_BYTES = 8  # an index of 32 bits and a value of 32 bits


class SelectLargest(Job):
    """The largest 1 % of a bucket and its residual; the rest stays in the residual."""

    baseline = "add_, torch.topk of abs(), index_fill_"

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.grad, self.residual = inputs(elements, dtype, device)
        selected = math.ceil(RATIO * elements)
        self.indices = torch.zeros(1, selected, dtype=torch.int32, device=device)
        self.values = torch.zeros(1, selected, device=device)
        super().__init__([self.grad, self.residual], [self.indices, self.values])

    @property
    def floor_bytes(self) -> float:
        """Gradient and residual in, residual out, and a second look at it once the threshold is known."""
        return self.grad.nbytes + 3 * self.residual.nbytes

    def run(self) -> None:
        """As topk encodes."""
        kernels.select_largest(
            self.grad, Residual(self.residual, self.residual), self.indices, self.values, self.grad.numel()
        )

    def run_baseline(self) -> None:
        """Not sorted, and ties as they come."""
        self.residual.add_(self.grad)
        chosen = torch.topk(self.residual.abs(), self.indices.numel(), sorted=False).indices
        self.indices[0].copy_(chosen)
        torch.index_select(self.residual, 0, chosen, out=self.values[0])
        self.residual.index_fill_(0, chosen, 0.0)

    def results(self) -> list[Output]:
        """All of it exactly: one sum an element, and ties by index."""
        parts = {"indices": self.indices, "values": self.values, "residual": self.residual}
        return [Output(name, values, exact=True) for name, values in parts.items()]


class ScatterMean(Job):
    """The mean of several ranks' 1 %, dense."""

    baseline = "zero_, scatter_add_"

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device, voters: int) -> None:
        shape = (voters, 1, math.ceil(RATIO * elements))
        self.indices = torch.zeros(shape, dtype=torch.int32, device=device)
        self.values = torch.zeros(shape, device=device)
        self.out = torch.zeros(elements, dtype=dtype, device=device)
        super().__init__([self.values], [self.out])

    @property
    def floor_bytes(self) -> float:
        """Every index and value in, the dense mean out."""
        return SPARSE_BYTES * self.values.numel() + self.out.nbytes

    def refill(self, numbers: HeavyTail) -> None:
        """Other places too."""
        super().refill(numbers)
        numbers.positions(self.indices.shape[-1], self.out.numel(), self.indices)

    def run(self) -> None:
        """As topk decodes."""
        kernels.scatter_mean(self.indices, self.values, self.out, self.out.numel(), ascending=True)

    def run_baseline(self) -> None:
        """All ranks in one call."""
        shares = self.values.view(-1).div(len(self.values))
        self.out.zero_().scatter_add_(0, self.indices.view(-1).long(), shares)

    def results(self) -> list[Output]:
        """The mean, up to rounding."""
        return [Output("out", self.out)]
