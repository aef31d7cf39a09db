"""One sign bit an element."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ... import kernels
from ...kernels import Places, Residual
from ..protocol.compressor import Traits
from ..protocol.registry import register
from .adapters import TwoShot
from .payload import padded
from .shared_random import check_rotation, signs_of

SCALE_BYTES = 4


@register(
    "onebit",
    adapter=TwoShot,
    error_feedback=0.7,
    traits=Traits(takes_16_bits=True, blocks=True),
)
@dataclass(frozen=True)
class OneBit:
    """Sign bits of rotated blocks, 8 to a byte, and one scale a block; error feedback on workers and servers.

    Seide et al. 2014 with the mean magnitude as scale; the all-to-all and the server's own error feedback as in
    DoubleSqueeze (Tang et al. 2019) and 1-bit Adam. `block`: elements that share a float32 scale, a multiple of 8.
    `rotate`: blocks are multiplied by a Hadamard matrix with random signs, always the same, before their signs are taken
    and back after they are decoded, so that all their elements are of a size (Vargaftik et al. 2021, DRIVE); `block` is
    then a power of two. Without it, the signs are those of the elements, as in Seide et al. Elements whose gradient is zero
    move: mask averages, not gradients. A row on the wire: its scales, then its bits.
    """

    block: int = 1024
    rotate: bool = True

    def __post_init__(self) -> None:
        if self.block < 8 or self.block % 8:
            raise ValueError(f"onebit:block is a multiple of 8, at least 8; got {self.block}")
        if self.rotate:
            check_rotation("onebit", self.block)

    def row_length(self, numel: int) -> int:
        """`numel` rounded up to whole blocks; without rotation to whole bytes where one short block holds it all."""
        unit = self.block if self.rotate or numel > self.block else 8
        return -(-numel // unit) * unit

    def row_bytes(self, length: int) -> int:
        """4 bytes a block and a bit an element, padded as rows are."""
        return padded(SCALE_BYTES * max(1, length // self.block) + length // 8)

    def encode(
        self, grad: Tensor, residual: Residual | None, rows: Tensor, length: int, places: Places | None = None
    ) -> None:
        """Signs and scales of `grad` (+ `residual`); `residual` keeps the difference."""
        signs = signs_of(self.block, grad, residual) if self.rotate else None
        kernels.sign_pack(grad, residual, *self._parts(rows, length), length, signs, places)

    def decode(
        self, rows: Tensor, out: Tensor, length: int, residual: Tensor | None = None, places: Places | None = None
    ) -> None:
        """The mean over voters of `scale * sign`; what `out` rounds away is added to `residual`."""
        signs = signs_of(self.block, out) if self.rotate else None
        kernels.sign_unpack_mean(*self._parts(rows, length), out, residual, signs, places)

    def _parts(self, rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Views of the scales and the bits of encoded rows."""
        scale_bytes = SCALE_BYTES * max(1, length // self.block)
        return rows[..., :scale_bytes].view(torch.float32), rows[..., scale_bytes : scale_bytes + length // 8]
