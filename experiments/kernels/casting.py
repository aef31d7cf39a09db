"""Jobs that change the number format of a bucket, or fill it."""

from __future__ import annotations

import torch

from ... import kernels
from .job import Job, Output

GRADIENT = 2**18  # elements of one of many gradients
SHARE = 0.25  # the scale of a cast before the sum of four ranks


class Narrow(Job):
    """A bucket to 16 bits, scaled."""

    baseline = "copy_, mul_"

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device, to: torch.dtype) -> None:
        self.source = torch.zeros(elements, dtype=dtype, device=device)
        self.out = torch.zeros(elements, dtype=to, device=device)
        super().__init__([self.source], [self.out])

    @property
    def floor_bytes(self) -> float:
        """One read, one write."""
        return self.source.nbytes + self.out.nbytes

    def run(self) -> None:
        """As the wrappers fp16 and bf16 send."""
        kernels.cast_scaled(self.source, self.out, SHARE)

    def run_baseline(self) -> None:
        """As torch's fp16 and bf16 hooks, without their allocation."""
        self.out.copy_(self.source).mul_(SHARE)

    def results(self) -> list[Output]:
        """The numbers, to the last bit."""
        return [Output("out", self.out, exact=True)]


class Widen(Narrow):
    """What arrived in 16 bits, to the dtype of the bucket."""

    baseline = "copy_"

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device, source: torch.dtype) -> None:
        super().__init__(elements, source, device, to=dtype)

    def run(self) -> None:
        """As the wrappers fp16 and bf16 receive."""
        kernels.cast_scaled(self.source, self.out, 1.0)

    def run_baseline(self) -> None:
        """As torch's hooks receive."""
        self.out.copy_(self.source)


class Gather(Job):
    """Gradients, one after another in a bucket, scaled."""

    baseline = "mul(out=) for each"

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.grads = [
            torch.zeros_like(piece) for piece in torch.zeros(elements, dtype=dtype, device=device).split(GRADIENT)
        ]
        self.out = torch.zeros(elements, dtype=dtype, device=device)
        super().__init__(self.grads, [self.out])

    @property
    def floor_bytes(self) -> float:
        """One read, one write."""
        return 2 * self.out.nbytes

    def run(self) -> None:
        """As gradwire's DistributedDataParallel fills a bucket."""
        kernels.gather_scaled(self.out, self.grads, range(0, self.out.numel(), GRADIENT), SHARE)

    def run_baseline(self) -> None:
        """As torch's."""
        for grad, place in zip(self.grads, self.out.split(GRADIENT), strict=True):
            torch.mul(grad, SHARE, out=place)

    def results(self) -> list[Output]:
        """The numbers, to the last bit."""
        return [Output("out", self.out, exact=True)]
