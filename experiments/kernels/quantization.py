"""Jobs of payloads of 8, 4 and 2 bits, which have a scale a block, and of rotations of blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import kernels
from ...kernels import Residual
from ...kernels.quantization import FORMATS
from .heavy_tail import HeavyTail
from .job import Job, Output, inputs

BLOCK = 128  # elements that share a scale: the default of the compressors int8, fp8, int4, int2 and ternary
FLOATS = {4: torch.float8_e4m3fn, 5: torch.float8_e5m2}  # by bits of the exponent


class QuantizeBlocks(Job):
    """A bucket and its residual to whole numbers, or floats, and block scales; what rounding loses stays in the residual."""

    baseline = "abs().amax, div, round, clamp, shifts where several share a byte, or a cast to float8, mul, sub_"

    def __init__(
        self, elements: int, dtype: torch.dtype, device: torch.device, bits: int = 8, exponent: int = 0
    ) -> None:
        self.length, self.bits, self.exponent = _whole_blocks(elements), bits, exponent
        self.grad, self._padded = inputs(elements, dtype, device)[0], torch.zeros(self.length, device=device)
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
        kernels.quantize_blocks(self.grad, residual, self.scales, self.codes, self.length, self.bits, self.exponent)

    def run_baseline(self) -> None:
        """Every operator a pass."""
        self.residual.add_(self.grad)
        blocks, (limit, steps, _, offset) = self._padded.view(-1, BLOCK), FORMATS[self.bits, self.exponent]
        torch.div(blocks.abs().amax(1), steps, out=self.scales[0])
        scales = self.scales.view(-1, 1)
        if self.exponent > 0:
            floats = blocks.div(scales).to(FLOATS[self.exponent])
            blocks.sub_(floats.float().mul_(scales))
            self.codes.copy_(floats.view(torch.int8).view(1, -1))
            return
        levels = blocks.div(scales)
        levels = levels.sub_(offset) if offset else levels
        levels = levels.round_().clamp_(-limit - offset, limit - offset).to(torch.int8)
        blocks.sub_((levels + offset if offset else levels) * scales)
        if self.bits < 8:
            levels = levels.view(-1, 8 // self.bits).bitwise_and_((1 << self.bits) - 1)
            levels = levels.bitwise_left_shift_(self._shifts).sum(1, dtype=torch.int8)
        self.codes.copy_(levels.view(1, -1))

    def results(self) -> list[Output]:
        """Scales and what both outputs say together; a code at the middle between two may go either way."""
        sent = torch.zeros(self.residual.numel(), device=self.residual.device)
        kernels.dequantize_mean.reference(self.scales[None], self.codes[None], sent, self.bits, self.exponent)
        return [Output("scales", self.scales), Output("sent and residual", sent + self.residual)]


class DequantizeMean(Job):
    """The mean of several ranks' blocks."""

    baseline = "shifts where several share a byte, addcmul_ of int8, or of float8 in float32"

    def __init__(
        self, elements: int, dtype: torch.dtype, device: torch.device, voters: int, bits: int = 8, exponent: int = 0
    ) -> None:
        length, self.bits, self.exponent = _whole_blocks(elements), bits, exponent
        self.scales = torch.zeros(voters, 1, length // BLOCK, device=device)
        numbers = torch.arange(voters * length * bits // 8, device=device) * 37 % 255 - 127
        if exponent > 0:
            numbers = torch.where(numbers % 128 > 123, 0, numbers)  # infinities and NaN
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
        kernels.dequantize_mean(self.scales, self.codes, self.out, self.bits, self.exponent)

    def run_baseline(self) -> None:
        """A pass for each rank."""
        total = torch.zeros(self._padded.numel() // BLOCK, BLOCK, device=self.out.device)
        for scales, codes in zip(self.scales, self.codes, strict=True):
            total.addcmul_(self._levels(codes).view_as(total), scales.view(-1, 1))
        self._padded.copy_(total.view(-1).div_(len(self.scales)))

    def _levels(self, codes: Tensor) -> Tensor:
        if self.exponent > 0:
            return codes.view(FLOATS[self.exponent]).float()
        if self.bits == 8:
            return codes
        raised = codes.view(-1, 1).bitwise_left_shift(8 - self.bits - self._shifts)
        levels, offset = raised.bitwise_right_shift_(8 - self.bits), FORMATS[self.bits, self.exponent].offset
        return levels + offset if offset else levels

    def results(self) -> list[Output]:
        """The mean, up to rounding."""
        return [Output("out", self.out)]


class RotateBlocks(Job):
    """A bucket times a Hadamard matrix a block."""

    baseline = "mul_ by the signs, a product with the matrix"

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device, block: int = BLOCK) -> None:
        self._padded = torch.zeros(-(-elements // block) * block, dtype=dtype, device=device)
        self.values = self._padded[:elements]
        self.signs = torch.ones(block, dtype=dtype, device=device)
        self.signs[::3] = -1
        matrix = torch.eye(block, dtype=dtype, device=device).view(-1)
        kernels.rotate_blocks.reference(matrix, torch.ones_like(self.signs))
        self._matrix = matrix.view(block, block)
        super().__init__([self._padded], [])

    @property
    def floor_bytes(self) -> float:
        """Once in and once out."""
        return 2 * self.values.nbytes

    def run(self) -> None:
        """In place."""
        kernels.rotate_blocks(self.values, self.signs)

    def run_baseline(self) -> None:
        """Whole blocks only."""
        blocks = self._padded.view(-1, len(self.signs)).mul_(self.signs)
        blocks.copy_(blocks @ self._matrix)

    def results(self) -> list[Output]:
        """The rotated blocks that are whole, up to rounding."""
        whole = len(self.values) // len(self.signs) * len(self.signs)
        return [Output("values", self.values[:whole])]


def _whole_blocks(elements: int) -> int:
    return -(-elements // BLOCK) * BLOCK
