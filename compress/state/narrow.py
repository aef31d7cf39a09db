"""Numbers that are kept in fewer bits than arithmetic has, as LoCo keeps residuals (Xie et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ... import kernels

WIDTHS = (32, 16, 8)  # bits of a residual's element; 32: as wide as arithmetic is
BLOCK = 128  # elements that share a scale


@dataclass(frozen=True)
class Narrow:
    """The form of `rows` rows of `numel` elements of `dtype`, each row in memory of its own.

    In 8 `bits` an element is a multiple of the scale of its block: at most half a 127th of the block's largest magnitude is
    rounded off. In 16 it is a bfloat16: at most a 256th of itself is. Zero is zero in both.
    """

    bits: int
    numel: int
    dtype: torch.dtype
    rows: int = 1

    @property
    def _length(self) -> int:
        unit = BLOCK if self.numel > BLOCK else 8
        return -(-self.numel // unit) * unit

    @property
    def _blocks(self) -> int:
        return max(1, self._length // BLOCK)

    def zeros(self, device: torch.device) -> Tensor:
        """Return rows of zeros."""
        if self.bits == 16 or not self.numel:
            return torch.zeros(self.rows, self.numel, dtype=torch.bfloat16, device=device)
        return torch.zeros(self.rows, self._length + 4 * self._blocks, dtype=torch.uint8, device=device)

    def _parts(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the scales and the codes of some rows."""
        return row[:, self._length :].view(torch.float32), row[:, : self._length].view(torch.int8)

    def unpacked(self, packed: Tensor) -> Tensor:
        """Return copies of the numbers of all rows, flat."""
        numbers = kernels.temporary(self.rows * self.numel, dtype=self.dtype, device=packed.device)
        rows = numbers.view(self.rows, self.numel)
        if packed.dtype == torch.bfloat16:
            rows.copy_(packed)
            return numbers
        whole = self.rows == 1 or self.numel == self._length
        length = self.rows * self._length
        wide = numbers if whole else kernels.temporary(length, dtype=self.dtype, device=packed.device)
        scales, codes = self._parts(packed)
        kernels.dequantize_mean(scales.unsqueeze(0), codes.unsqueeze(0), wide)
        if not whole:
            rows.copy_(wide.view(self.rows, -1)[:, : self.numel])
        return numbers

    def pack(self, numbers: Tensor, packed: Tensor) -> None:
        """Write the flat numbers of all rows."""
        rows = numbers.view(self.rows, self.numel)
        if packed.dtype == torch.bfloat16:
            packed.copy_(rows)
            return
        if self.rows > 1 and self.numel < self._length:
            numbers = pad(rows, (0, self._length - self.numel)).view(-1)
        kernels.quantize_blocks(numbers, None, *self._parts(packed), self._length)

    def multiply(self, before: Tensor, factor: float, after: Tensor) -> None:
        """Write the numbers times a factor; `after` may be `before`. In 8 bits nothing is rounded anew but the scales."""
        if before.dtype == torch.bfloat16:
            torch.mul(before, factor, out=after)
            return
        if after is not before:
            after.copy_(before)
        self._parts(after)[0].mul_(factor)
