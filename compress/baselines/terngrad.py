"""Three levels, at random, of clipped gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ... import kernels
from ...kernels import Places, Residual
from ...kernels.operands import in_blocks, out_of_blocks
from ..algorithms.adapters import TwoShot
from ..algorithms.quantized import BlockCodes
from ..protocol.layout import working_dtype
from ..protocol.registry import register
from .draws import DRAWS


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
        self,
        grad: Tensor,
        residual: Residual | None,
        rows: Tensor,
        length: int,
        key: int = 0,
        counter: int = 0,
        places: Places | None = None,
    ) -> None:
        """Levels and scales of what `clip` leaves of `grad` (+ `residual`); `residual` keeps the difference."""
        scales, codes = self._parts(rows, length)
        if residual is None and self.clip is not None:
            wide = grad.to(working_dtype(grad.dtype))  # what is cut is not rounded
            grad = _clipped(wide, scales.numel(), length // scales.shape[1], self.clip, places)
        code = length, self.bits, self.exponent
        kernels.quantize_blocks(grad, residual, scales, codes, *code, None, key, counter, places)


def _clipped(grad: Tensor, blocks: int, block: int, clip: float, places: Places | None) -> Tensor:
    values = in_blocks(grad, blocks, block, places)
    counts = in_blocks(torch.ones_like(grad), blocks, block, places).sum(1, keepdim=True).clamp_(min=1)
    limits = (values.square().sum(1, keepdim=True) / counts).sqrt_().mul_(clip)
    return out_of_blocks(values.clamp(-limits, limits), grad.numel(), places)
