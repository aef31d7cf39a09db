"""Blocks times a Hadamard matrix with random signs, so that no element stands out: for codecs of few bits.

Ananda Theertha Suresh, Felix X. Yu, Sanjiv Kumar, H. Brendan McMahan, "Distributed Mean Estimation with Limited
Communication", ICML 2017, section 3. The signs are always the same, on all ranks.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...kernels import Residual
from ...kernels.quantization import uniform
from ..protocol.layout import working_dtype

SEED = 0  # of the signs


def check_rotation(method: str, block: int) -> None:
    """Raise ValueError unless blocks of so many elements can be rotated."""
    if block & (block - 1):
        raise ValueError(f"{method}:block is a power of two where blocks are rotated, got {block}")


def signs_of(block: int, values: Tensor, residual: Residual | None = None) -> Tensor:
    """1 or -1 for each element of a block, in the dtype of arithmetic with `values` (+ `residual`)."""
    dtype = working_dtype(values.dtype) if residual is None else residual.after.dtype
    return _drawn_signs(block, dtype, values.device)


@functools.lru_cache(maxsize=16)
def _drawn_signs(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.where(uniform(SEED, 0, block, device) < 0.5, -1, 1).to(dtype)
