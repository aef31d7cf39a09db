"""The products of PowerSGD, and the bases and unit vectors of its factors."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..checks import WIDE
from ..factors import Factors
from ..low_rank import low_rank_finish, low_rank_left, low_rank_right, normalize, orthogonalize
from ..residual import Residual
from .library import NAME, NONE, library

LARGEST_RANK = 32


def _beyond(*arguments: Any) -> str:
    """Which matrices C++ does not know, where there are any."""
    for factors in (each for each in arguments if isinstance(each, Factors)):
        if any(m.rank > LARGEST_RANK or not m.rows * m.columns for m in factors.matrices):
            return f"empty matrices and ranks above {LARGEST_RANK}"
    return ""


@low_rank_left.implement(NAME, {"grad": WIDE, "residual": WIDE, "q": WIDE, "p": WIDE}, unless=_beyond)
def _low_rank_left(grad: Tensor, residual: Residual | None, factors: Factors, q: Tensor, p: Tensor) -> None:
    library().low_rank_left(*_packed(factors), grad, *(residual or NONE), p, q, torch.get_num_threads())


@low_rank_right.implement(NAME, {"matrices": WIDE, "p": WIDE, "q": WIDE}, unless=_beyond)
def _low_rank_right(matrices: Tensor, factors: Factors, p: Tensor, q: Tensor) -> None:
    library().low_rank_right(*_packed(factors), matrices, *NONE, p, q, torch.get_num_threads())


@low_rank_finish.implement(NAME, {"grad": WIDE, "residual": WIDE, "p": WIDE, "q": WIDE}, unless=_beyond)
def _low_rank_finish(grad: Tensor, residual: Tensor | None, factors: Factors, p: Tensor, q: Tensor) -> None:
    library().low_rank_finish(*_packed(factors), grad, residual, residual, p, q, torch.get_num_threads())


@orthogonalize.implement(NAME, {"p": WIDE}, unless=_beyond)
def _orthogonalize(p: Tensor, factors: Factors) -> None:
    library().orthogonalize(*_packed(factors), p, torch.get_num_threads())


@normalize.implement(NAME, {"q": WIDE, "previous": WIDE}, unless=_beyond)
def _normalize(q: Tensor, factors: Factors, previous: Tensor | None = None) -> None:
    library().normalize(*_packed(factors), q, previous, torch.get_num_threads())


@functools.lru_cache(maxsize=1024)
def _packed(factors: Factors) -> tuple[Tensor, int]:
    """A row of int64 for each matrix, and how many there are."""
    offsets = zip(factors.matrices, factors.left_offsets, factors.right_offsets, strict=False)
    rows = [(m.offset, m.rows, m.columns, m.rank, left, right) for m, left, right in offsets]
    return torch.tensor(rows, dtype=torch.int64, device="cpu"), len(rows)
