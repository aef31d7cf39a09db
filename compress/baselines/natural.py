"""Powers of two, up or down at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..algorithms.adapters import TwoShot
from ..protocol.registry import register
from .codes import DRAWS, TorchCodes, shares

LEAST = -126  # the exponent of the smallest power of two
MANTISSA, BIAS = 23, 127  # of float32


@register("natural", adapter=TwoShot, error_feedback=False, traits=DRAWS)
@dataclass(frozen=True)
class Natural(TorchCodes):
    """Each element as a power of two times the largest of its block, up or down at random so that its mean is exact.

    Horvath et al. 2019, "Natural Compression for Distributed Deep Learning": the variance is at most an eighth of the
    squared norm, so that no error feedback is needed. A sign and 7 bits of exponent an element; what is smaller than 2^-126
    of its block's largest becomes that or zero. `block`: elements that share a float32 scale, a multiple of 8.
    """

    method: ClassVar[str] = "natural"
    bits: ClassVar[int] = 8

    def in_scales(self, blocks: Tensor, counts: Tensor, fed_back: bool) -> tuple[Tensor, Tensor]:
        """Scales are the largest magnitudes."""
        largest = blocks.abs().amax(1, keepdim=True)
        return largest, shares(blocks, largest)

    def rounded(self, levels: Tensor, random: Tensor | None) -> Tensor:
        """Return a sign and the exponent of a power of two from `LEAST` on, which is 1; 0 stands for zero."""
        assert random is not None  # it always draws
        powers = (levels.frexp().exponent - 1).clamp_(min=LEAST)  # of the next power of two towards zero
        whole = (
            (levels / ((powers + BIAS) << MANTISSA).view(torch.float32) + random).floor_().int()
        )  # once that, or twice
        sizes = torch.where(whole == 0, 0, whole.abs() + powers - LEAST)
        return torch.where(whole < 0, sizes - 128, sizes)

    def numbers(self, codes: Tensor) -> Tensor:
        """Return the powers of two, whose exponents are those of float32."""
        bits = codes.int()
        return ((bits & 127) << MANTISSA | bits & torch.iinfo(torch.int32).min).view(torch.float32)
