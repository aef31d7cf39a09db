"""Blocks times a Hadamard matrix with random signs, so that no element stands out: for codecs of few bits.

Ananda Theertha Suresh, Felix X. Yu, Sanjiv Kumar, H. Brendan McMahan, "Distributed Mean Estimation with Limited
Communication", ICML 2017, section 3. The signs are always the same, on all ranks.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ... import kernels
from ...kernels import Residual
from ...kernels.quantization import uniform
from ..protocol.layout import working_dtype

SEED = 0  # of the signs


def rotated(grad: Tensor, residual: Residual | None, block: int) -> tuple[Tensor, Residual | None]:
    """The same in rotated blocks: their sum is in the place of both residuals, and `grad` zero."""
    if residual is None:
        wide = grad.to(working_dtype(grad.dtype))
        kernels.rotate_blocks(wide, _signs(block, wide))
        return wide, None
    values = residual.plus(grad)
    kernels.rotate_blocks(values, _signs(block, values))
    return grad.zero_(), Residual(values, values)


def rotate_back(values: Tensor, block: int) -> None:
    """Undo it, in place."""
    kernels.rotate_blocks(values, _signs(block, values), True)


def check_rotation(method: str, block: int) -> None:
    """Raise ValueError unless blocks of so many elements can be rotated."""
    if block & (block - 1):
        raise ValueError(f"{method}:block is a power of two where blocks are rotated, got {block}")


def _signs(block: int, like: Tensor) -> Tensor:
    """1 or -1 for each element of a block."""
    return _drawn_signs(block, like.dtype, like.device)


@functools.lru_cache(maxsize=16)
def _drawn_signs(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.where(uniform(SEED, 0, block, device) < 0.5, -1, 1).to(dtype)
