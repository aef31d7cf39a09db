"""Three levels a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..algorithms.adapters import TwoShot
from ..algorithms.quantized import Quantized, traits_of_codes
from ..protocol.registry import register


@register("ternary", adapter=TwoShot, traits=traits_of_codes)
@dataclass(frozen=True)
class Ternary(Quantized):
    """Two bits an element, -1, 0 or 1 times the scale of its block, averaged in float32 by an all-to-all and an all-gather.

    A scale is the largest magnitude over 2.25, which loses least where gradients have heavy tails, or with random rounding
    and no error feedback all of it, as in TernGrad (Wen et al. 2017). Options: see `Quantized`.
    """

    method: ClassVar[str] = "ternary"
    bits: ClassVar[int] = 2
