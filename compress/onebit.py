"""One sign bit an element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import kernels
from ..kernels import Residual
from .adapters import TwoShot
from .registry import register
from .rows import padded

SCALE_BYTES = 4


@register("onebit", adapter=TwoShot)
@dataclass(frozen=True)
class OneBit:
    """Sign bits, 8 to a byte, and one scale a block; error feedback on workers and servers.

    Seide et al. 2014 with the mean magnitude as scale; the all-to-all and the server's own error feedback as in
    DoubleSqueeze (Tang et al. 2019) and 1-bit Adam. `block`: elements that share a float32 scale, a multiple of 8.
    A row on the wire: its scales, then its bits.
    """

    block: int = 1024
    takes_16_bits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.block < 8 or self.block % 8:
            raise ValueError(f"onebit:block is a multiple of 8, at least 8; got {self.block}")

    def row_length(self, numel: int) -> int:
        """`numel` rounded up to whole blocks, or to whole bytes where one short block holds it all."""
        unit = self.block if numel > self.block else 8
        return -(-numel // unit) * unit

    def row_bytes(self, length: int) -> int:
        """4 bytes a block and a bit an element, padded as rows are."""
        return padded(SCALE_BYTES * self._blocks(length) + length // 8)

    def encode(self, grad: Tensor, residual: Residual | None, rows: Tensor, length: int) -> None:
        """Signs and scales of `grad` (+ `residual`); `residual` keeps the difference."""
        kernels.sign_pack(grad, residual, *self._parts(rows, length), length)

    def decode(self, rows: Tensor, out: Tensor, length: int, residual: Tensor | None = None) -> None:
        """The mean over voters of `scale * sign`; what `out` rounds away is added to `residual`."""
        kernels.sign_unpack_mean(*self._parts(rows, length), out, residual)

    def _blocks(self, length: int) -> int:
        return max(1, length // self.block)

    def _parts(self, rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Views of the scales and the bits of encoded rows."""
        scale_bytes = SCALE_BYTES * self._blocks(length)
        return rows[..., :scale_bytes].view(torch.float32), rows[..., scale_bytes : scale_bytes + length // 8]
