"""Three levels a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..algorithms.adapters import TwoShot
from ..protocol.registry import register
from .codes import LATTICE, TorchCodes, shares

STEPS = 2.25  # scales that the largest magnitude of a block is: loses least where gradients have heavy tails


@register("ternary", adapter=TwoShot, traits=LATTICE)
@dataclass(frozen=True)
class Ternary(TorchCodes):
    """Two bits an element, -1, 0 or 1 times the scale of its block, averaged in float32 by an all-to-all and an all-gather.

    `block`: elements that share a float32 scale, a multiple of 8. For random rounding see `terngrad:clip=none`.
    """

    method: ClassVar[str] = "ternary"
    bits: ClassVar[int] = 2

    def in_scales(self, blocks: Tensor, counts: Tensor, fed_back: bool) -> tuple[Tensor, Tensor]:
        """Scales are the largest magnitudes over `STEPS`."""
        largest = blocks.abs().amax(1, keepdim=True)
        return largest / STEPS, shares(blocks, largest) * STEPS
