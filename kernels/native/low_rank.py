"""The products of PowerSGD."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import FLOATS, WIDE
from ..factors import Factors
from ..low_rank import low_rank_finish, low_rank_left, low_rank_right
from ..residual import Residual
from .library import NAME, NONE, library
from .matrices import beyond, packed


@low_rank_left.implement(NAME, {"grad": FLOATS, "residual": WIDE, "q": WIDE, "p": WIDE}, unless=beyond)
def _low_rank_left(grad: Tensor, residual: Residual | None, factors: Factors, q: Tensor, p: Tensor) -> None:
    library().low_rank_left(*packed(factors), grad, *(residual or NONE), p, q, torch.get_num_threads())


@low_rank_right.implement(NAME, {"matrices": FLOATS, "p": WIDE, "q": WIDE}, unless=beyond)
def _low_rank_right(matrices: Tensor, factors: Factors, p: Tensor, q: Tensor) -> None:
    library().low_rank_right(*packed(factors), matrices, *NONE, p, q, torch.get_num_threads())


@low_rank_finish.implement(NAME, {"grad": FLOATS, "residual": WIDE, "p": WIDE, "q": WIDE}, unless=beyond)
def _low_rank_finish(grad: Tensor, residual: Tensor | None, factors: Factors, p: Tensor, q: Tensor) -> None:
    library().low_rank_finish(*packed(factors), grad, residual, residual, p, q, torch.get_num_threads())
