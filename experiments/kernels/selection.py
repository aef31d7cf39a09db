"""Jobs of top-k: the choice of the largest elements, and the mean of several ranks' choices."""

from __future__ import annotations

import math

import torch

from ... import kernels
from ...kernels import Residual
from .job import Job, Output, inputs

RATIO = 0.01
SPARSE_BYTES = 8  # an index of 32 bits and a value of 32 bits


def select_largest(elements: int, dtype: torch.dtype, device: torch.device) -> Job:
    """The largest 1 % of a bucket and its residual, as topk encodes; the rest stays in the residual.

    Gradient and residual in, residual out, and a second look at it once the threshold is known. All of it exactly: one sum
    an element, and ties by index. The baseline's are not sorted, and have ties as they come.
    """
    grad, residual = inputs(elements, dtype, device)
    indices = torch.zeros(1, math.ceil(RATIO * elements), dtype=torch.int32, device=device)
    values = torch.zeros(indices.shape, device=device)

    def run_baseline() -> None:
        residual.add_(grad)
        chosen = torch.topk(residual.abs(), indices.numel(), sorted=False).indices
        indices[0].copy_(chosen)
        torch.index_select(residual, 0, chosen, out=values[0])
        residual.index_fill_(0, chosen, 0.0)

    parts = {"indices": indices, "values": values, "residual": residual}
    return Job(
        "add_, torch.topk of abs(), index_fill_",
        [grad, residual],
        [indices, values],
        grad.nbytes + 3 * residual.nbytes,
        run=lambda: kernels.select_largest(grad, Residual(residual, residual), indices, values, elements),
        run_baseline=run_baseline,
        results=lambda: [Output(name, tensor, exact=True) for name, tensor in parts.items()],
    )


def scatter_mean(elements: int, dtype: torch.dtype, device: torch.device, voters: int) -> Job:
    """The mean of several ranks' 1 % as a full bucket, as topk decodes: every index and value in, the mean out."""
    indices = torch.zeros(voters, 1, math.ceil(RATIO * elements), dtype=torch.int32, device=device)
    values = torch.zeros(indices.shape, device=device)
    out = torch.zeros(elements, dtype=dtype, device=device)

    def run_baseline() -> None:
        shares = values.view(-1).div(voters)
        out.zero_().scatter_add_(0, indices.view(-1).long(), shares)

    return Job(
        "zero_, scatter_add_",
        [values],
        [out],
        SPARSE_BYTES * values.numel() + out.nbytes,
        run=lambda: kernels.scatter_mean(indices, values, out, elements, ascending=True),
        run_baseline=run_baseline,
        results=lambda: [Output("out", out)],
        prepare=lambda numbers: numbers.positions(indices.shape[-1], elements, indices),
    )
