"""Jobs that pass over a bucket once: casts, signs, the search for numbers that are not finite."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from ... import kernels
from ...kernels import Residual
from .heavy_tail import HeavyTail
from .job import Job, Output, bucket

BLOCK = 1024  # elements that share a scale: the default of the compressor onebit
GRADIENT = 2**18  # elements of one of many gradients
SHARE = 0.25  # the scale of a cast before the sum of four ranks
BYTE_OF_FLAGS = 0x0102040810204080  # times 8 bytes of 0 or 1: the highest byte of the product has them as bits


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


class SignPack(Job):
    """A bucket and its residual to signs and block scales; what they miss stays in the residual."""

    baseline = "abs().sum, >= 0 packed by int64 multiplication, copysign, sub_"

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.length = whole_blocks(elements)
        self.grad, self._padded = bucket(elements, dtype, device)[0], torch.zeros(self.length, device=device)
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


def whole_blocks(elements: int) -> int:
    """`elements` rounded up to whole blocks."""
    return -(-elements // BLOCK) * BLOCK
