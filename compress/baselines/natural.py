"""Powers of two, up or down at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ... import kernels
from ...kernels import Places, Residual
from ..algorithms.adapters import TwoShot
from ..algorithms.quantized import BlockCodes
from ..protocol.registry import register
from .draws import DRAWS


@register("natural", adapter=TwoShot, feedback=0, traits=DRAWS)
@dataclass(frozen=True)
class Natural(BlockCodes):
    """Each element as a power of two times the largest of its block, up or down at random so that its mean is exact.

    Horvath et al. 2019, "Natural Compression for Distributed Deep Learning": the variance is at most an eighth of the
    squared norm, so that no error feedback is needed. A sign and 7 bits of exponent an element; what is smaller than 2^-126
    of its block's largest becomes that or zero. `block`: elements that share a float32 scale, a multiple of 8.
    """

    method: ClassVar[str] = "natural"
    bits: ClassVar[int] = 8
    exponent: ClassVar[int] = 7

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
        """Powers of two and scales of `grad` (+ `residual`); `residual` keeps the difference."""
        code = length, self.bits, self.exponent
        kernels.quantize_blocks(grad, residual, *self._parts(rows, length), *code, None, key, counter, places)
