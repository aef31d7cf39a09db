"""Jobs of 8-bit payloads, which have a scale a block."""

from __future__ import annotations

import torch

from ... import kernels
from ...kernels import Residual
from .heavy_tail import HeavyTail
from .job import Job, Output, bucket
from .signs import BLOCK, whole_blocks

LARGEST_CODE = 127


class QuantizeBlocks(Job):
    """A bucket and its residual to int8 and block scales; what rounding loses stays in the residual."""

    baseline = "abs().amax, div, round, mul, sub_"

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.length = whole_blocks(elements)
        self.grad, self._padded = bucket(elements, dtype, device)[0], torch.zeros(self.length, device=device)
        self.residual = self._padded[:elements]
        self.scales = torch.zeros(1, self.length // BLOCK, device=device)
        self.codes = torch.zeros(1, self.length, dtype=torch.int8, device=device)
        super().__init__([self.grad, self.residual], [self.scales])

    @property
    def floor_bytes(self) -> float:
        """Gradient and residual in, residual, codes and scales out."""
        return self.grad.nbytes + 2 * self.residual.nbytes + self.scales.nbytes + self.residual.numel()

    def refill(self, numbers: HeavyTail) -> None:
        """Zeros behind the end too, which the baseline writes over; no code is -128."""
        self._padded.zero_()
        self.codes.fill_(-128)
        super().refill(numbers)

    def run(self) -> None:
        """Rounded to nearest."""
        kernels.quantize_blocks(self.grad, Residual(self.residual, self.residual), self.scales, self.codes, self.length)

    def run_baseline(self) -> None:
        """Every operator a pass."""
        self.residual.add_(self.grad)
        blocks = self._padded.view(-1, BLOCK)
        torch.div(blocks.abs().amax(1), LARGEST_CODE, out=self.scales[0])
        scales = self.scales.view(-1, 1)
        self.codes.view(-1, BLOCK).copy_(blocks.div(scales).round_())
        blocks.sub_(self.codes.view(-1, BLOCK) * scales)

    def results(self) -> list[Output]:
        """Scales and what both outputs say together; a code at the middle between two may go either way."""
        sent = (self.codes.view(-1, BLOCK) * self.scales.view(-1, 1)).view(-1)[: self.residual.numel()]
        return [Output("scales", self.scales), Output("sent and residual", sent + self.residual)]


class DequantizeMean(Job):
    """The mean of several ranks' int8 blocks."""

    baseline = "addcmul_ of int8"

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device, voters: int) -> None:
        length = whole_blocks(elements)
        self.scales = torch.zeros(voters, 1, length // BLOCK, device=device)
        numbers = torch.arange(voters * length, device=device) * 37 % 255 - LARGEST_CODE
        self.codes = numbers.to(torch.int8).view(voters, 1, length)
        self._padded = torch.zeros(length, dtype=dtype, device=device)
        self.out = self._padded[:elements]
        super().__init__([self.scales], [self.out])

    @property
    def floor_bytes(self) -> float:
        """Every rank's codes in, the mean out."""
        return self.scales.nbytes + len(self.codes) * self.out.numel() + self.out.nbytes

    def run(self) -> None:
        """All ranks in one pass."""
        kernels.dequantize_mean(self.scales, self.codes, self.out)

    def run_baseline(self) -> None:
        """A pass for each rank."""
        total = torch.zeros(self._padded.numel() // BLOCK, BLOCK, device=self.out.device)
        for scales, codes in zip(self.scales, self.codes, strict=True):
            total.addcmul_(codes.view_as(total), scales.view(-1, 1))
        self._padded.copy_(total.view(-1).div_(len(self.scales)))

    def results(self) -> list[Output]:
        """The mean, up to rounding."""
        return [Output("out", self.out)]
