"""The models that are defined here: a transformer, an LSTM, a perceptron and a ResNet for small images."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.functional import relu


class GPT(nn.Module):
    """A causal language model with learned positions and normalisation before each block (Radford et al. 2019)."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"model.width is a multiple of model.heads, got {width} and {heads}")
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.blocks.parameters():  # TransformerEncoder starts with copies of one layer
            if parameter.dim() > 1:
                nn.init.xavier_normal_(parameter)
        nn.init.normal_(self.positions.weight, std=0.1)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, positions, vocabulary) of the next token, from tokens (batch, positions)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.blocks(self.tokens(tokens) + self.positions(positions), mask, is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits


class LSTM(nn.Module):
    """Embedding, LSTM and a tied output layer: with the defaults of WikiText-2 28,949,319 parameters (Vogels 2019)."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.tokens.weight
        nn.init.uniform_(self.tokens.weight, -0.1, 0.1)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, positions, vocabulary) of the next token, from tokens (batch, positions)."""
        hidden, _ = self.lstm(self.tokens(tokens))
        logits: Tensor = self.head(hidden)
        return logits


class MLP(nn.Sequential):
    """Logits (batch, classes) from images of any shape."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, width: int, layers: int) -> None:
        sizes = [prod(input_shape), *[width] * layers]
        hidden = [module for sides in pairwise(sizes) for module in (nn.Linear(*sides), nn.ReLU())]
        super().__init__(nn.Flatten(), *hidden, nn.Linear(sizes[-1], classes))


def _convolution(inside: int, outside: int, size: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inside, outside, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outside))


class Block(nn.Module):
    """Two 3 x 3 convolutions around a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(inside, outside, 3, stride)
        self.second = _convolution(outside, outside, 3)
        plain = inside == outside and stride == 1
        self.shortcut: nn.Module = nn.Identity() if plain else _convolution(inside, outside, 1, stride)

    def forward(self, images: Tensor) -> Tensor:
        """Features (batch, outside, height / stride, width / stride)."""
        return relu(self.second(relu(self.first(images))) + self.shortcut(images))


class ResNet18(nn.Sequential):
    """Logits (batch, classes) from images; with 3 channels and 10 classes 11,173,962 parameters (He et al. 2016).

    As is usual for CIFAR: the first convolution is 3 x 3 with stride 1, and there is no pooling before the blocks. `width`:
    channels of the first stage; later ones have 2, 4 and 8 times as many. `blocks`: of each stage.
    """

    def __init__(self, channels: int, classes: int, width: int = 64, blocks: int = 2) -> None:
        stages, inside = [], width
        for outside, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            stages += [Block(inside, outside, stride), *(Block(outside, outside, 1) for _ in range(blocks - 1))]
            inside = outside
        pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, classes))
        super().__init__(_convolution(channels, width, 3), nn.ReLU(), *stages, *pooled)
