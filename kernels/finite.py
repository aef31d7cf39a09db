"""Checks for numbers that are not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import operation


@operation
def all_finite(tensor: Tensor) -> Tensor:
    """A boolean scalar on the tensor's device: no element is infinite or NaN. One pass, no copy, no host wait."""
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    smallest, largest = torch.aminmax(tensor)
    return torch.isfinite(smallest) & torch.isfinite(largest)


def with_gaps(tensor: Tensor) -> str:
    """Why a backend that reads memory from end to end leaves a tensor to the next one; empty where it need not."""
    return "" if tensor.is_contiguous() else "tensors that are not contiguous"


@all_finite.on_meta
def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.bool, device=tensor.device)
