"""Three levels, at random, of clipped gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..algorithms.adapters import TwoShot
from ..protocol.registry import register
from .codes import DRAWS, TorchCodes, shares
from .ternary import STEPS


@register("terngrad", adapter=TwoShot, error_feedback=False, traits=DRAWS)
@dataclass(frozen=True)
class TernGrad(TorchCodes):
    """Each element as -1, 0 or 1 times the largest of its block, at random so that its mean is exact, after clipping.

    Wen et al. 2017, TernGrad, with a scale a block where the paper has one a layer. `clip`: elements above so many root mean
    squares of their block are cut to that first, on workers and servers (section 5.3: 2.5); `none` cuts nothing, and only
    then is the average unbiased. `block`: elements that share a float32 scale, a multiple of 8. With error feedback its
    scale is that of `ternary`, since noise as large as this adds up.
    """

    block: int = 1024
    clip: float | None = 2.5
    method: ClassVar[str] = "terngrad"
    bits: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"terngrad:clip is above 0, or none; got {self.clip}")

    def in_scales(self, blocks: Tensor, counts: Tensor, fed_back: bool) -> tuple[Tensor, Tensor]:
        """Scales are the largest magnitudes of what `clip` leaves."""
        if self.clip is not None and not fed_back:
            limits = (blocks.square().sum(1, keepdim=True) / counts.clamp(min=1)).sqrt_().mul_(self.clip)
            blocks = blocks.clamp(-limits, limits)
        largest, steps = blocks.abs().amax(1, keepdim=True), STEPS if fed_back else 1.0
        return largest / steps, shares(blocks, largest) * steps
