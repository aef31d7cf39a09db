"""Jobs of 1-bit payloads: a bucket to signs, and the mean of several ranks' signs."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding

from ... import kernels
from ...kernels import Residual
from .heavy_tail import HeavyTail
from .job import Job, Output, inputs

BLOCK = 1024  # elements that share a scale: the default of the compressor onebit
BYTE_OF_FLAGS = 0x0102040810204080  # times 8 bytes of 0 or 1: the highest byte of the product has them as bits


class SignPack(Job):
    """A bucket and its residual to signs and block scales; what they miss stays in the residual."""

    baseline = "abs().sum, >= 0 packed by int64 multiplication, copysign, sub_"

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.length = whole_blocks(elements)
        self.grad, self._padded = inputs(elements, dtype, device)[0], torch.zeros(self.length, device=device)
        self.residual = self._padded[:elements]
        self.scales = torch.zeros(1, self.length // BLOCK, device=device)
        self.bits = torch.zeros(1, self.length // 8, dtype=torch.uint8, device=device)
        self._counts = torch.full_like(self.scales[0], BLOCK)
        self._counts[-1] = BLOCK - (self.length - elements)
        super().__init__([self.grad, self.residual], [self.scales, self.bits])

    @property
    def floor_bytes(self) -> float:
        """Gradient and residual in, residual, bits and scales out."""
        return self.grad.nbytes + 2 * self.residual.nbytes + self.scales.nbytes + self.residual.numel() / 8

    def refill(self, numbers: HeavyTail) -> None:
        """Zeros behind the end too, which the baseline writes over."""
        self._padded.zero_()
        super().refill(numbers)

    def run(self) -> None:
        """As onebit encodes."""
        kernels.sign_pack(self.grad, Residual(self.residual, self.residual), self.scales, self.bits, self.length)

    def run_baseline(self) -> None:
        """The fastest of several ways with torch's operators."""
        self.residual.add_(self.grad)
        blocks = self._padded.view(-1, BLOCK)
        torch.div(blocks.abs().sum(1), self._counts, out=self.scales[0])
        flags = (self._padded >= 0).view(torch.int64)
        self.bits[0].copy_(flags.mul(BYTE_OF_FLAGS).bitwise_right_shift_(56))
        blocks.sub_(torch.copysign(self.scales.view(-1, 1), blocks))

    def results(self) -> list[Output]:
        """Bits exactly; scales and residual up to the rounding of sums. Bits behind the end do not count."""
        bits = self.bits[0, : self.grad.numel() // 8]
        return [Output("bits", bits, exact=True), Output("scales", self.scales), Output("residual", self.residual)]


class SignUnpackMean(Job):
    """The mean of several ranks' signs and scales."""

    baseline = "embedding of bytes, addcmul_"

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device, voters: int) -> None:
        length = whole_blocks(elements)
        self.scales = torch.zeros(voters, 1, length // BLOCK, device=device)
        self.bits = torch.zeros(voters, 1, length // 8, dtype=torch.uint8, device=device)
        self._padded = torch.zeros(length, dtype=dtype, device=device)
        self.out = self._padded[:elements]
        bit = torch.arange(256).unsqueeze(1).bitwise_right_shift(torch.arange(8)).bitwise_and(1)
        self._signs = bit.mul(2).sub(1).to(device, torch.float32)
        super().__init__([self.scales, self.bits], [self.out])

    @property
    def floor_bytes(self) -> float:
        """Every vote in, the mean out."""
        return self.scales.nbytes + len(self.bits) * self.out.numel() / 8 + self.out.nbytes

    def run(self) -> None:
        """As onebit decodes."""
        kernels.sign_unpack_mean(self.scales, self.bits, self.out)

    def run_baseline(self) -> None:
        """A table of the signs in each byte: the fastest of several ways with torch's operators."""
        total = torch.zeros(self._padded.numel() // BLOCK, BLOCK, device=self.out.device)
        for scales, bits in zip(self.scales, self.bits, strict=True):
            signs = embedding(bits[0].int(), self._signs).view_as(total)
            total.addcmul_(signs, scales.view(-1, 1))
        self._padded.copy_(total.view(-1).div_(len(self.scales)))

    def results(self) -> list[Output]:
        """The mean, up to rounding."""
        return [Output("out", self.out)]


def whole_blocks(elements: int) -> int:
    """`elements` rounded up to whole blocks."""
    return -(-elements // BLOCK) * BLOCK
