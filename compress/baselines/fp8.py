"""Floats of 8 bits a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..algorithms.adapters import TwoShot
from ..algorithms.quantized import Quantized, traits_of_codes
from ..protocol.registry import register

EXPONENTS = {"e4m3": 4, "e5m2": 5}  # their bits


@register("fp8", adapter=TwoShot, traits=traits_of_codes)
@dataclass(frozen=True)
class FP8(Quantized):
    """Floats of 8 bits and a scale a block, averaged in float32 by an all-to-all and an all-gather.

    `format`: e4m3, with 3 bits of mantissa, whose block may span 2^18, or e5m2, with 2 bits and 2^32 (Micikevicius et al.
    2022). A scale is a 448th or a 57344th of the largest magnitude of its block. In blocks of 128, `int8` loses less: its
    error is at most sqrt(128) / 127 / sqrt(12), 2.6 % of a block's norm, and that of e4m3 about 2.6 % of any. Other
    options: see `Quantized`.
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"
    method: ClassVar[str] = "fp8"
    bits: ClassVar[int] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in EXPONENTS:
            raise ValueError(f"fp8:format is {' or '.join(EXPONENTS)}, got {self.format!r}")

    @property
    def exponent(self) -> int:  # type: ignore[override]
        """Bits of the exponent."""
        return EXPONENTS[self.format]
