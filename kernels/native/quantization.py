"""Payloads of 8, 4 and 2 bits, and rotations."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import FLOATS, WIDE
from ..quantization import FORMATS, dequantize_mean, quantize_blocks, steps_of
from ..residual import Residual
from ..rotation import rotate_blocks
from .library import NAME, NONE, library


@quantize_blocks.implement(NAME, {"grad": FLOATS, "residual": WIDE})
def _quantize_blocks(
    grad: Tensor,
    residual: Residual | None,
    scales: Tensor,
    codes: Tensor,
    length: int,
    bits: int = 8,
    exponent: int = 0,
    seed: int = -1,
    counter: int = 0,
) -> None:
    rows, blocks = scales.shape
    places = grad.numel(), rows, blocks, length // blocks
    steps, limit = steps_of(bits, exponent, seed, residual), FORMATS[bits, exponent].limit
    levels = bits, exponent, steps, limit, seed, counter
    library().quantize_blocks(grad, *(residual or NONE), scales, codes, *places, *levels, torch.get_num_threads())


@dequantize_mean.implement(NAME, {"out": FLOATS, "residual": WIDE})
def _dequantize_mean(
    scales: Tensor, codes: Tensor, out: Tensor, bits: int = 8, exponent: int = 0, residual: Tensor | None = None
) -> None:
    voters, _, blocks = scales.shape
    block = codes.shape[2] * 8 // bits // blocks
    places = voters, out.numel(), blocks, block
    library().dequantize_mean(scales, codes, out, residual, *places, bits, exponent, torch.get_num_threads())


@rotate_blocks.implement(NAME, {"values": WIDE, "signs": WIDE})
def _rotate_blocks(values: Tensor, signs: Tensor, back: bool = False) -> None:
    library().rotate_blocks(values, signs, values.numel(), signs.numel(), back, torch.get_num_threads())
