"""Few bits an element: whole multiples of a scale a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .. import kernels
from ..kernels import Residual
from .adapters import TwoShot
from .registry import register
from .rows import padded

SCALE_BYTES = 4


@dataclass(frozen=True)
class Quantized:
    """Codes of `bits` bits and one float32 scale a block of `block` elements, a multiple of 8; error feedback on both sides.

    `rounding`: to the nearest code, or up and down at random (`stochastic`), so that the mean of many is exact without
    error feedback too (Alistarh et al. 2017, QSGD); by Philox with a key a bucket and rank and a counter a step. A row on
    the wire: its codes, then its scales.
    """

    block: int = 128
    rounding: Literal["nearest", "stochastic"] = "nearest"
    bits: ClassVar[int]

    def __post_init__(self) -> None:
        name = type(self).__name__.lower()
        if self.block < 8 or self.block % 8:
            raise ValueError(f"{name}:block is a multiple of 8, at least 8; got {self.block}")
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"{name}:rounding is nearest or stochastic, got {self.rounding!r}")

    @property
    def draws(self) -> bool:
        """Whether codes are rounded at random."""
        return self.rounding == "stochastic"

    def row_length(self, numel: int) -> int:
        """`numel` rounded up to whole blocks, or to a multiple of 8 where one short block holds it all."""
        unit = self.block if numel > self.block else 8
        return -(-numel // unit) * unit

    def row_bytes(self, length: int) -> int:
        """So many bits an element and 4 bytes a block, padded."""
        return padded(self._code_bytes(length) + SCALE_BYTES * self._blocks(length))

    def encode(
        self, grad: Tensor, residual: Residual | None, rows: Tensor, length: int, key: int = -1, counter: int = 0
    ) -> None:
        """Codes and scales of `grad` (+ `residual`); `residual` keeps the difference. With a key, rounded at random."""
        scales, codes = self._parts(rows, length)
        kernels.quantize_blocks(grad, residual, scales, codes, length, self.bits, key, counter)

    def decode(self, rows: Tensor, out: Tensor, length: int) -> None:
        """The mean over voters of `scale * code`."""
        kernels.dequantize_mean(*self._parts(rows, length), out, self.bits)

    def _blocks(self, length: int) -> int:
        return max(1, length // self.block)

    def _code_bytes(self, length: int) -> int:
        """Up to where scales may begin."""
        return -(-length * self.bits // 8 // SCALE_BYTES) * SCALE_BYTES

    def _parts(self, rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Views of the scales and the codes of encoded rows."""
        start = self._code_bytes(length)
        scales = rows[..., start : start + SCALE_BYTES * self._blocks(length)].view(torch.float32)
        return scales, rows[..., : length * self.bits // 8].view(torch.int8)


@register("int8", adapter=TwoShot)
@dataclass(frozen=True)
class Int8(Quantized):
    """Eight bits an element and a scale a block, averaged in float32 by an all-to-all and an all-gather.

    A scale is a 127th of the largest magnitude of its block (Dettmers 2016, with equal distances). The two rounds are those
    of ZeRO++ (Wang et al. 2023). Options: see `Quantized`.
    """

    bits: ClassVar[int] = 8


@register("int4", adapter=TwoShot)
@dataclass(frozen=True)
class Int4(Quantized):
    """Four bits an element and a scale a block, averaged in float32 by an all-to-all and an all-gather.

    Codes from -7 to 7; a scale is an 8th of the largest magnitude. ZeRO++ (Wang et al. 2023)
    and SDP4Bit (Jia et al. 2024) send gradients so; LoCo (Xie et al. 2024) adds error feedback. Options: see `Quantized`.
    """

    bits: ClassVar[int] = 4


@register("ternary", adapter=TwoShot)
@dataclass(frozen=True)
class Ternary(Quantized):
    """Two bits an element, -1, 0 or 1 times the scale of its block, averaged in float32 by an all-to-all and an all-gather.

    A scale is the largest magnitude over 2.25, which loses least where gradients have heavy tails, or with random rounding
    and no error feedback all of it, as in TernGrad (Wen et al. 2017). Options: see `Quantized`.
    """

    bits: ClassVar[int] = 2
