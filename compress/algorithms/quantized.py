"""Few bits an element: multiples of a scale a block."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ... import kernels
from ...kernels import Places, Residual
from ..protocol.compressor import Traits
from .payload import padded
from .shared_random import check_rotation, signs_of

SCALE_BYTES = 4


@dataclass(frozen=True)
class BlockCodes:
    """Codes of `bits` bits, and one float32 scale a block of `block` elements. A row on the wire: codes, then scales."""

    block: int = 128
    method: ClassVar[str]
    bits: ClassVar[int]

    def __post_init__(self) -> None:
        if self.block < 8 or self.block % 8:
            raise ValueError(f"{self.method}:block is a multiple of 8, at least 8; got {self.block}")

    def row_length(self, numel: int) -> int:
        """`numel` rounded up to whole blocks, or to a multiple of 8 where one short block holds it all."""
        unit = self.block if numel > self.block else 8
        return -(-numel // unit) * unit

    def row_bytes(self, length: int) -> int:
        """Return `bits` an element and 4 bytes a block, in bytes, padded."""
        return padded(places_in_row(self.bits, self.block, length)[0].stop)


@functools.cache
def places_in_row(bits: int, block: int, length: int) -> tuple[slice, slice]:
    """Return the bytes of a row that are scales, and those that are codes; scales begin at a multiple of their size."""
    start = -(-length * bits // (8 * SCALE_BYTES)) * SCALE_BYTES
    return slice(start, start + SCALE_BYTES * max(1, length // block)), slice(length * bits // 8)


@dataclass(frozen=True)
class Quantized(BlockCodes):
    """Codes and a scale a block of `block` elements, a multiple of 8; error feedback on both sides.

    `rounding`: to the nearest code, or up and down at random (`stochastic`), so that the mean of many is exact without
    error feedback too (Alistarh et al. 2017, QSGD); by Philox with a key a bucket and rank and a counter a step. `rotate`:
    blocks are multiplied by a Hadamard matrix with random signs, always the same, before they are encoded and back after
    they are decoded, so that no element stands out (Suresh et al. 2017; Jia et al. 2024, SDP4Bit); `block` is then a power
    of two, and elements whose gradient is zero move. So mask averages, not gradients. `core`: the rank of a low-rank part
    of each matrix that PowerSGD averages in 8 bits, so that codes are those of the rest alone; 0 for none. Elements whose
    gradient is zero then move.
    """

    rounding: Literal["nearest", "stochastic"] = "nearest"
    rotate: bool = False
    core: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"{self.method}:rounding is nearest or stochastic, got {self.rounding!r}")
        if self.core < 0:
            raise ValueError(f"{self.method}:core is a rank, or 0 for no low-rank part; got {self.core}")
        if self.rotate:
            check_rotation(self.method, self.block)

    def row_length(self, numel: int) -> int:
        """`numel` rounded up to whole blocks; without rotation to a multiple of 8 where one short block holds it all."""
        return -(-numel // self.block) * self.block if self.rotate else super().row_length(numel)

    def encode(
        self,
        grad: Tensor,
        residual: Residual | None,
        rows: Tensor,
        length: int,
        key: int = -1,
        counter: int = 0,
        places: Places | None = None,
    ) -> None:
        """Codes and scales of `grad` (+ `residual`); `residual` keeps the difference. With a key, rounded at random."""
        signs = signs_of(self.block, grad, residual) if self.rotate else None
        scales, codes = places_in_row(self.bits, self.block, length)
        code = rows[..., scales].view(torch.float32), rows[..., codes].view(torch.int8), length, self.bits, signs
        kernels.quantize_blocks(grad, residual, *code, key, counter, places)

    def decode(
        self, rows: Tensor, out: Tensor, length: int, residual: Tensor | None = None, places: Places | None = None
    ) -> None:
        """The mean over voters of `scale * code`; what `out` rounds away is added to `residual`."""
        signs = signs_of(self.block, out) if self.rotate else None
        scales, codes = places_in_row(self.bits, self.block, length)
        code = rows[..., scales].view(torch.float32), rows[..., codes].view(torch.int8)
        kernels.dequantize_mean(*code, out, self.bits, residual, signs, places)


def traits_of_codes(codec: Quantized) -> Traits:
    """Return the traits that options decide on: rotated blocks, and codes without zero, decode zeros as other numbers."""
    keeps_zeros = codec.bits > 2 and not codec.rotate
    return Traits(takes_16_bits=True, keeps_zeros=keeps_zeros, blocks=True, draws=codec.rounding == "stochastic")


@dataclass(frozen=True)
class Int8(Quantized):
    """Eight bits an element and a scale a block, averaged in float32 by an all-to-all and an all-gather.

    A scale is a 127th of the largest magnitude of its block (Dettmers 2016, with equal distances). The two rounds are those
    of ZeRO++ (Wang et al. 2023). Options: see `Quantized`.
    """

    method: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8


@dataclass(frozen=True)
class Int4(Quantized):
    """Four bits an element and a scale a block, averaged in float32 by an all-to-all and an all-gather.

    Codes from -7 to 7; a scale is an 8th of the largest magnitude. ZeRO++ (Wang et al. 2023)
    and SDP4Bit (Jia et al. 2024) send gradients so; LoCo (Xie et al. 2024) adds error feedback. Options: see `Quantized`.
    """

    method: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4


@dataclass(frozen=True)
class Int2(Quantized):
    """Two bits an element and a scale a block, of rotated blocks, averaged in float32 by an all-to-all and an all-gather.

    -3/2, -1/2, 1/2 or 3/2 times a scale, which is half the largest magnitude, or with random rounding and no error
    feedback two thirds of it. Without a code for zero nothing is off by more than half a scale. Elements whose gradient is
    zero move: mask averages, not gradients. Options: see `Quantized`.
    """

    rotate: bool = True
    method: ClassVar[str] = "int2"
    bits: ClassVar[int] = 2
