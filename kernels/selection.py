"""Selection of the elements of largest magnitude, and the way back."""

from __future__ import annotations

import torch
from torch import Tensor

from .argument_checks import check_scatter_mean, check_select_largest
from .dispatch import operation
from .operands import Residual


@operation(check=check_select_largest, apart=[("grad", "residual", "indices"), ("grad", "residual", "values")])
def select_largest(grad: Tensor, residual: Residual | None, indices: Tensor, values: Tensor, length: int) -> None:
    """The largest elements by magnitude of `grad` (+ `residual`), row by row; `residual.after` keeps the rest.

    The flat vector is cut into rows of `length`, the last may be shorter. `indices`: int32 or int64 (rows, k), position
    within the row, ascending; `values`: (rows, k), rounded to their dtype and clamped to its finite range, what rounding
    loses stays in `residual.after`. Exact: of equal magnitudes the lower index wins; NaN counts as largest. Where a row has
    fewer than k elements the rest is index 0, value 0.
    """
    corrected = grad if residual is None else residual.plus(grad)
    for row, vector in enumerate(corrected.split(length)):
        chosen = largest_indices(vector, values.shape[1])
        picked = vector[chosen]
        sent = narrowed(picked, values.dtype)
        indices[row].zero_()[: chosen.numel()] = chosen
        values[row].zero_()[: chosen.numel()] = sent
        if residual is not None:
            vector[chosen] = picked - sent
    for row in range(-(-corrected.numel() // length), len(indices)):
        indices[row].zero_()
        values[row].zero_()


@operation(check=check_scatter_mean, apart=[("indices", "out"), ("values", "out")])
def scatter_mean(indices: Tensor, values: Tensor, out: Tensor, length: int, ascending: bool = False) -> None:
    """The mean over voters of sparse rows, dense, into the flat `out`.

    `indices`, `values`: (voters, rows, k); added in voter order, so that every rank gets the same bits. `ascending`: the
    caller's word that rows are as `select_largest` writes them, each index above the one before, zeros behind as many as
    the row has elements; faster on GPUs, where elements get lost if it is not so.
    """
    voters, rows, _ = indices.shape
    starts = torch.arange(rows, device=out.device).unsqueeze(1) * length
    out.zero_()
    for voter in range(voters):
        positions = (indices[voter] + starts).view(-1).clamp_(max=out.numel() - 1)
        out.index_add_(0, positions, values[voter].reshape(-1).to(out.dtype), alpha=1 / voters)


def largest_indices(vector: Tensor, k: int) -> Tensor:
    """The indices, ascending, of the k elements of largest magnitude; of equal ones the lower index is taken."""
    magnitude = torch.nan_to_num(vector.abs(), nan=torch.inf, posinf=torch.inf)
    if k >= magnitude.numel():
        return torch.arange(magnitude.numel(), device=vector.device)
    threshold = torch.topk(magnitude, k, sorted=False).values.min()
    above = (magnitude > threshold).nonzero().view(-1)
    ties = (magnitude == threshold).nonzero().view(-1)[: k - above.numel()]
    return torch.cat([above, ties]).sort().values


def narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` in `dtype`, those beyond its range at its largest finite number; infinities and NaN stay."""
    limit = min(torch.finfo(dtype).max, torch.finfo(values.dtype).max)
    return torch.where(values.isfinite(), values.clamp(-limit, limit), values).to(dtype)
