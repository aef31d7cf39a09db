"""Jobs of payloads of 8, 4 and 2 bits, which have a scale a block, and of rotations of blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import kernels
from ...kernels import Residual
from ...kernels.quantization import FORMATS
from .heavy_tail import HeavyTail
from .job import Job, Output, bucket

BLOCK = 128  # elements that share a scale: the default of the compressors int8, fp8, int4 and ternary
FLOATS = {4: torch.float8_e4m3fn, 5: torch.float8_e5m2}  # by bits of the exponent


class QuantizeBlocks(Job):
    """A bucket and its residual to whole numbers and block scales; what rounding loses stays in the residual."""

    baseline = "abs().amax, div, round, clamp, shifts where several share a byte, mul, sub_"

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device, bits: int = 8) -> None:
        self.length, self.bits = _whole_blocks(elements), bits
        self.grad, self._padded = bucket(elements, dtype, device)[0], torch.zeros(self.length, device=device)
        self.residual = self._padded[:elements]
        self.scales = torch.zeros(1, self.length // BLOCK, device=device)
        self.codes = torch.zeros(1, self.length * bits // 8, dtype=torch.int8, device=device)
        self._shifts = torch.arange(0, 8, bits, dtype=torch.int8, device=device)
        super().__init__([self.grad, self.residual], [self.scales])

    @property
    def floor_bytes(self) -> float:
        """Gradient and residual in, residual, codes and scales out."""
        codes = self.residual.numel() * self.bits / 8
        return self.grad.nbytes + 2 * self.residual.nbytes + self.scales.nbytes + codes

    def refill(self, numbers: HeavyTail) -> None:
        """Zeros behind the end too, which the baseline writes over; no code is -128."""
        self._padded.zero_()
        self.codes.fill_(-128)
        super().refill(numbers)

    def run(self) -> None:
        """Rounded to nearest."""
        residual = Residual(self.residual, self.residual)
        kernels.quantize_blocks(self.grad, residual, self.scales, self.codes, self.length, self.bits)

    def run_baseline(self) -> None:
        """Every operator a pass."""
        self.residual.add_(self.grad)
        blocks, limit = self._padded.view(-1, BLOCK), LARGEST_CODES[self.bits]
        torch.div(blocks.abs().amax(1), STEPS[self.bits], out=self.scales[0])
        scales = self.scales.view(-1, 1)
        levels = blocks.div(scales).round_().clamp_(-limit, limit).to(torch.int8)
        blocks.sub_(levels * scales)
        if self.bits < 8:
            levels = levels.view(-1, 8 // self.bits).bitwise_and_((1 << self.bits) - 1)
            levels = levels.bitwise_left_shift_(self._shifts).sum(1, dtype=torch.int8)
        self.codes.copy_(levels.view(1, -1))

    def results(self) -> list[Output]:
        """Scales and what both outputs say together; a code at the middle between two may go either way."""
        sent = torch.zeros(self.residual.numel(), device=self.residual.device)
        kernels.dequantize_mean.reference(self.scales[None], self.codes[None], sent, self.bits)
        return [Output("scales", self.scales), Output("sent and residual", sent + self.residual)]


class DequantizeMean(Job):
    """The mean of several ranks' blocks."""

    baseline = "shifts where several share a byte, addcmul_ of int8"

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device, voters: int, bits: int = 8) -> None:
        length, self.bits = _whole_blocks(elements), bits
        self.scales = torch.zeros(voters, 1, length // BLOCK, device=device)
        numbers = torch.arange(voters * length * bits // 8, device=device) * 37 % 255 - 127
        self.codes = numbers.to(torch.int8).view(voters, 1, -1)
        self._shifts = torch.arange(0, 8, bits, dtype=torch.int8, device=device)
        self._padded = torch.zeros(length, dtype=dtype, device=device)
        self.out = self._padded[:elements]
        super().__init__([self.scales], [self.out])

    @property
    def floor_bytes(self) -> float:
        """Every rank's codes in, the mean out."""
        return self.scales.nbytes + len(self.codes) * self.out.numel() * self.bits / 8 + self.out.nbytes

    def run(self) -> None:
        """All ranks in one pass."""
        kernels.dequantize_mean(self.scales, self.codes, self.out, self.bits)

    def run_baseline(self) -> None:
        """A pass for each rank."""
        total = torch.zeros(self._padded.numel() // BLOCK, BLOCK, device=self.out.device)
        for scales, codes in zip(self.scales, self.codes, strict=True):
            total.addcmul_(self._levels(codes).view_as(total), scales.view(-1, 1))
        self._padded.copy_(total.view(-1).div_(len(self.scales)))

    def _levels(self, codes: Tensor) -> Tensor:
        if self.bits == 8:
            return codes
        raised = codes.view(-1, 1).bitwise_left_shift(8 - self.bits - self._shifts)
        return raised.bitwise_right_shift_(8 - self.bits)

    def results(self) -> list[Output]:
        """The mean, up to rounding."""
        return [Output("out", self.out)]


def _whole_blocks(elements: int) -> int:
    return -(-elements // BLOCK) * BLOCK
