"""A multi-layer perceptron."""

from __future__ import annotations

from itertools import pairwise
from math import prod

from torch import nn


class MLP(nn.Sequential):
    """Logits (batch, classes) from images of any shape."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, width: int, layers: int) -> None:
        sizes = [prod(input_shape), *[width] * layers]
        hidden = [module for sides in pairwise(sizes) for module in (nn.Linear(*sides), nn.ReLU())]
        super().__init__(nn.Flatten(), *hidden, nn.Linear(sizes[-1], classes))
