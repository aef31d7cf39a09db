"""Random numbers that all ranks draw alike: generators by words, and the signs of rotated blocks.

Blocks times a Hadamard matrix with random signs have no element that stands out: for codecs of few bits. Ananda Theertha
Suresh, Felix X. Yu, Sanjiv Kumar, H. Brendan McMahan, "Distributed Mean Estimation with Limited Communication", ICML 2017,
section 3.
"""

from __future__ import annotations

import functools
import hashlib

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


def seeded_generator(*words: object) -> torch.Generator:
    """A private CPU generator whose numbers depend on `words` alone: the same on every rank and in every run.

    >>> torch.randperm(5, generator=seeded_generator(0, "weight"), device="cpu").tolist()
    [1, 2, 4, 3, 0]
    """
    digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
