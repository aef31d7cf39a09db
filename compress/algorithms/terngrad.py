"""Three levels, at random, of clipped gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ... import kernels
from ...kernels import Residual
from ..protocol.layout import working_dtype
from ..protocol.registry import register
from .adapters import TwoShot
from .blocks import in_blocks
from .quantized import DRAWS, BlockCodes


@register("terngrad", adapter=TwoShot, feedback=0, traits=DRAWS)
@dataclass(frozen=True)
class TernGrad(BlockCodes):
    """Each element as -1, 0 or 1 times the largest of its block, at random so that its mean is exact, after clipping.

    Wen et al. 2017, TernGrad, with a scale a block where the paper has one a layer. `clip`: elements above so many root mean
    squares of their block are cut to that first, on workers and servers (section 5.3: 2.5); `none` cuts nothing, and only
    then is the average unbiased. `block`: elements that share a float32 scale, a multiple of 8. With error feedback it
    rounds as `ternary` does, since noise as large as this adds up.
    """

    block: int = 1024
    clip: float | None = 2.5
    method: ClassVar[str] = "terngrad"
    bits: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"terngrad:clip is above 0, or none; got {self.clip}")

    def encode(
        self, grad: Tensor, residual: Residual | None, rows: Tensor, length: int, key: int = 0, counter: int = 0
    ) -> None:
        """Levels and scales of what `clip` leaves of `grad` (+ `residual`); `residual` keeps the difference."""
        scales, codes = self._parts(rows, length)
        if residual is None and self.clip is not None:
            grad = grad.to(working_dtype(grad.dtype))  # what is cut is not rounded
            _clip(grad, self.block, self.clip)
        kernels.quantize_blocks(grad, residual, scales, codes, length, self.bits, self.exponent, None, key, counter)


def _clip(grad: Tensor, block: int, clip: float) -> None:
    whole, rest = in_blocks(grad, block)
    for blocks in (whole, rest.unsqueeze(0)):
        if blocks.numel():
            limits = blocks.square().mean(1, keepdim=True).sqrt_().mul_(clip)
            blocks.clamp_(-limits, limits)
