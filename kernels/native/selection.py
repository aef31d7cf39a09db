"""Selection of the largest elements, and the way back."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_scatter_mean, check_select_largest, known, require, tensors_of
from ..residual import Residual
from ..selection import scatter_mean, select_largest
from .library import NAME, array, arrays, library


@select_largest.implement(NAME)
def _select_largest(grad: Tensor, residual: Residual | None, indices: Tensor, values: Tensor, length: int) -> None:
    wide = (torch.float32,)
    if not (
        known(NAME, select_largest, grad, values) and known(NAME, select_largest, *tensors_of(residual), dtypes=wide)
    ):
        return select_largest.reference(grad, residual, indices, values, length)
    check_select_largest(grad, residual, indices, values, length)
    given = array(grad), *arrays(residual), array(indices), array(values)
    library().select_largest(*given, grad.numel(), length, *values.shape, torch.get_num_threads())


@scatter_mean.implement(NAME)
def _scatter_mean(indices: Tensor, values: Tensor, out: Tensor, length: int) -> None:
    if not (known(NAME, scatter_mean, values) and known(NAME, scatter_mean, out, dtypes=(torch.float32,))):
        return scatter_mean.reference(indices, values, out, length)
    check_scatter_mean(indices, values, out)
    require(length > 0, f"a row has at least one element, got {length}")
    given = array(indices), array(values), array(out)
    library().scatter_mean(*given, *values.shape, out.numel(), length, torch.get_num_threads())
