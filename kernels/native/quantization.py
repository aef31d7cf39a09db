"""Payloads of 8, 4 and 2 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import FLOATS, WIDE
from ..quantization import LARGEST_CODES, dequantize_mean, quantize_blocks, steps_of
from ..residual import Residual
from .library import NAME, NONE, library


@quantize_blocks.implement(NAME, {"grad": FLOATS, "residual": WIDE})
def _quantize_blocks(
    grad: Tensor,
    residual: Residual | None,
    scales: Tensor,
    codes: Tensor,
    length: int,
    bits: int = 8,
    seed: int = -1,
    counter: int = 0,
) -> None:
    rows, blocks = scales.shape
    places = grad.numel(), rows, blocks, length // blocks
    levels = bits, steps_of(bits, seed, residual), LARGEST_CODES[bits], seed, counter
    library().quantize_blocks(grad, *(residual or NONE), scales, codes, *places, *levels, torch.get_num_threads())


@dequantize_mean.implement(NAME, {"out": FLOATS})
def _dequantize_mean(scales: Tensor, codes: Tensor, out: Tensor, bits: int = 8) -> None:
    voters, _, blocks = scales.shape
    block = codes.shape[2] * 8 // bits // blocks
    library().dequantize_mean(scales, codes, out, voters, out.numel(), blocks, block, bits, torch.get_num_threads())
