"""The matrices of a bucket as C++ reads them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..factors import Factors

LARGEST_RANK = 32


def beyond(*arguments: Any) -> str:
    """Return the matrices that C++ does not support; None if it supports all."""
    for factors in (each for each in arguments if isinstance(each, Factors)):
        if any(m.rank > LARGEST_RANK or not m.rows * m.columns for m in factors.matrices):
            return f"empty matrices and ranks above {LARGEST_RANK}"
    return ""


@functools.lru_cache(maxsize=1024)
def packed(factors: Factors) -> tuple[Tensor, int]:
    """A row of int64 for each matrix, and how many there are."""
    offsets = zip(factors.matrices, factors.left_offsets, factors.right_offsets, strict=False)
    rows = [(m.offset, m.rows, m.columns, m.rank, left, right) for m, left, right in offsets]
    return torch.tensor(rows, dtype=torch.int64, device="cpu"), len(rows)
