"""Checks for numbers that are not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import FLOATS
from ..finite import all_finite, with_gaps
from .library import NAME, library


@all_finite.implement(NAME, {"tensor": FLOATS}, unless=with_gaps)
def _all_finite(tensor: Tensor) -> Tensor:
    finite = library().all_finite(tensor, tensor.numel(), torch.get_num_threads())
    return torch.tensor(finite, device="cpu")
