"""Levels of the norm, at random."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..algorithms.adapters import TwoShot
from ..protocol.registry import register
from .codes import DRAWS, TorchCodes, shares


@register("qsgd", adapter=TwoShot, error_feedback=False, traits=DRAWS)
@dataclass(frozen=True)
class QSGD(TorchCodes):
    """Each element as a part of its block's norm, rounded up or down to one of `levels` so that its mean is exact.

    Alistarh et al. 2017, QSGD, section 3.1, with codes of a fixed length: 2 bits for 1 level, 4 up to 7, 8 up to 127.
    Levels are equal parts of the Euclidean norm; `int8` and `int4` with `rounding=stochastic` and `terngrad` take parts of
    the largest magnitude. `block`: elements that share a norm in float32, a multiple of 8. With error feedback all is
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
        return next(bits for bits in (2, 4, 8) if self.levels < 2 ** (bits - 1))

    def variance(self, size: int) -> float:
        """The bound of the error's mean square over a vector's square, for a block of so many elements: lemma 3.1."""
        return min(size / self.levels**2, math.sqrt(size) / self.levels)

    def in_scales(self, blocks: Tensor, counts: Tensor, fed_back: bool) -> tuple[Tensor, Tensor]:
        """Scales are a level of the norm, with error feedback less."""
        blocks = blocks.float()
        norms = torch.linalg.vector_norm(blocks, dim=1, keepdim=True, dtype=torch.float64).float()
        share = 1 / (1 + self.variance(blocks.shape[1])) if fed_back else 1.0
        return norms * (share / self.levels), shares(blocks, norms) * self.levels
