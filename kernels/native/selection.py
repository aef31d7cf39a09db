"""Selection of the largest elements, and the way back."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import FLOATS, WIDE
from ..residual import Residual
from ..selection import scatter_mean, select_largest
from .library import NAME, NONE, library


@select_largest.implement(NAME, {"grad": FLOATS, "residual": WIDE, "values": FLOATS})
def _select_largest(grad: Tensor, residual: Residual | None, indices: Tensor, values: Tensor, length: int) -> None:
    places = grad.numel(), length, *values.shape
    library().select_largest(grad, *(residual or NONE), indices, values, *places, torch.get_num_threads())


@scatter_mean.implement(NAME, {"values": FLOATS, "out": WIDE})
def _scatter_mean(indices: Tensor, values: Tensor, out: Tensor, length: int, ascending: bool = False) -> None:
    library().scatter_mean(indices, values, out, *values.shape, out.numel(), length, torch.get_num_threads())
