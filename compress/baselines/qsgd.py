"""Levels of the norm, at random."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ... import kernels
from ...kernels import Places, Residual
from ...kernels.operands import in_blocks
from ...kernels.quantization import FORMATS, pack, uniform
from ..algorithms.adapters import TwoShot
from ..algorithms.quantized import BlockCodes
from ..protocol.registry import register
from .draws import DRAWS


@register("qsgd", adapter=TwoShot, feedback=0, traits=DRAWS)
@dataclass(frozen=True)
class QSGD(BlockCodes):
    """Each element as a part of its block's norm, rounded up or down to one of `levels` so that its mean is exact.

    Alistarh et al. 2017, QSGD, section 3.1, with codes of a fixed length: 2 bits for 1 level, 4 up to 7, 8 up to 127.
    Levels are equal parts of the Euclidean norm; `int8`, `int4` and `ternary` with `rounding=stochastic` take parts of the
    largest magnitude. `block`: elements that share a norm in float32, a multiple of 8. With error feedback all is
    divided by one plus the bound of the variance, which makes a contraction of it (Beznosikov et al. 2020).
    """

    levels: int = 127
    method: ClassVar[str] = "qsgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.levels <= 127:
            raise ValueError(f"qsgd:levels is 1 to 127, got {self.levels}")

    @property
    def bits(self) -> int:  # type: ignore[override]
        """The fewest bits of a code that hold all levels and a sign."""
        return min(bits for (bits, exponent), each in FORMATS.items() if not exponent and each.limit >= self.levels)

    def variance(self, size: int) -> float:
        """The bound of the error's mean square over a vector's square, for a block of so many elements: lemma 3.1."""
        return min(size / self.levels**2, math.sqrt(size) / self.levels)

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
        """Levels and scales of `grad` (+ `residual`); `residual` keeps the difference."""
        scales, codes = self._parts(rows, length)
        values = grad if residual is None else residual.plus(grad)
        padded = in_blocks(values.float(), scales.numel(), length // scales.shape[1], places).view(*scales.shape, -1)
        norms = torch.linalg.vector_norm(padded, dim=2, keepdim=True, dtype=torch.float64).float()
        levels = padded / torch.where(norms == 0, 1, norms) * self.levels
        levels += uniform(key, counter, levels.numel(), levels.device).view_as(levels)
        levels = torch.where(norms.isfinite(), levels.floor_().clamp_(-self.levels, self.levels), 0)
        codes.copy_(pack(levels.view(len(rows), length).to(torch.int8), self.bits))
        share = 1.0 if residual is None else 1 / (1 + self.variance(padded.shape[2]))
        scales.copy_(norms.squeeze(2) * (share / self.levels))
        if residual is not None:
            said = torch.empty_like(values)
            kernels.dequantize_mean(scales[None], codes[None], said, self.bits, places=places)
            values.sub_(said)
