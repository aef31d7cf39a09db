"""Whether numbers are finite."""

from __future__ import annotations

import torch
from torch import Tensor


def all_finite(tensor: Tensor) -> Tensor:
    """A boolean scalar on the tensor's device: no element is infinite or NaN. One pass, no copy, no host wait."""
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    smallest, largest = torch.aminmax(tensor)
    return torch.isfinite(smallest) & torch.isfinite(largest)
