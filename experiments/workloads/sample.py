"""Shapes of samples: all that a model and its data set know of each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Batch: TypeAlias = tuple[Tensor, Tensor]  # inputs and targets


@dataclass(frozen=True)
class SampleShape:
    """The shape of a sample.

    `kind` is `tokens` (int64 tokens and the tokens that follow, both (context,)) or `images` (float32 `input_shape` and
    an int64 class).
    """

    name: str
    kind: str
    classes: int
    input_shape: tuple[int, ...]

    def example(self, samples: int) -> Batch:
        """Samples of zeros, on torch's default device."""
        if self.kind == "tokens":
            inputs = torch.zeros(samples, *self.input_shape, dtype=torch.int64)
            return inputs, inputs.clone()
        return torch.zeros(samples, *self.input_shape), torch.zeros(samples, dtype=torch.int64)
