"""Codes of blocks by torch's operators, for payloads that no kernel has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import Places, Residual
from ...kernels.operands import in_blocks, out_of_blocks
from ...kernels.quantization import pack, uniform, unpacked
from ..algorithms.payload import rounded_once
from ..algorithms.quantized import BlockCodes, places_in_row
from ..protocol.compressor import Traits
from ..protocol.layout import working_dtype

LATTICE = Traits(takes_16_bits=True, keeps_zeros=True, blocks=True)
DRAWS = Traits(takes_16_bits=True, keeps_zeros=True, blocks=True, draws=True)


@dataclass(frozen=True)
class TorchCodes(BlockCodes):
    """Codes of `bits` bits and one float32 scale a block, which a subclass chooses by `in_scales` and `rounded`."""

    def in_scales(self, blocks: Tensor, counts: Tensor, fed_back: bool) -> tuple[Tensor, Tensor]:
        """Return the scale of each block, and its elements in units of this scale, not rounded.

        `blocks`: (blocks, elements), zeros behind the end; `counts`: the elements before it, (blocks, 1).
        """
        raise NotImplementedError

    def rounded(self, levels: Tensor, random: Tensor | None) -> Tensor:
        """Round `levels` to numbers that `bits` bits hold, up or down by `random` from [0, 1), or to the nearest."""
        levels = levels.round() if random is None else (levels + random).floor_()
        limit = 2 ** (self.bits - 1) - 1
        return levels.clamp_(-limit, limit)

    def numbers(self, codes: Tensor) -> Tensor:
        """Return what codes stand for, in scales."""
        return codes

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
        scales, codes = self._views(rows, length)
        values = grad if residual is None else residual.plus(grad)
        wide, cut = values.to(working_dtype(values.dtype)), (scales.numel(), length // scales.shape[1], places)
        counts = in_blocks(torch.ones_like(wide), *cut).sum(1, keepdim=True)
        sizes, levels = self.in_scales(in_blocks(wide, *cut), counts, residual is not None)
        random = None if key < 0 else uniform(key, counter, levels.numel(), levels.device).view_as(levels)
        scales.copy_(sizes.view_as(scales))
        codes.copy_(pack(self.rounded(levels, random).to(torch.int8).view(len(rows), length), self.bits))
        if residual is not None:
            values.sub_(out_of_blocks(self._said(scales, codes), values.numel(), places))

    def decode(
        self, rows: Tensor, out: Tensor, length: int, residual: Tensor | None = None, places: Places | None = None
    ) -> None:
        """The mean over voters of `scale * code`; what `out` rounds away is added to `residual`."""
        scales, codes = self._views(rows, length)

        def write(wide: Tensor) -> None:
            total = self._said(scales[0], codes[0]).to(wide.dtype)
            for voter in range(1, len(scales)):
                total.add_(self._said(scales[voter], codes[voter]))
            wide.copy_(out_of_blocks(total.div_(len(scales)), wide.numel(), places))

        rounded_once(out, residual, write)

    def _views(self, rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the scales and the codes of encoded rows, sharing memory."""
        scales, codes = places_in_row(self.bits, self.block, length)
        return rows[..., scales].view(torch.float32), rows[..., codes].view(torch.int8)

    def _said(self, scales: Tensor, codes: Tensor) -> Tensor:
        """Return `scale * code` of every element, float32 (blocks, elements)."""
        return self.numbers(unpacked(codes, self.bits)).reshape(scales.numel(), -1) * scales.reshape(-1, 1)


def shares(blocks: Tensor, sizes: Tensor) -> Tensor:
    """Return the elements over the size of their block; zeros for a block whose size is zero or not finite."""
    return torch.where(sizes.isfinite(), blocks / torch.where(sizes == 0, 1, sizes), 0)
