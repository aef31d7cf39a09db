"""ResNet-18 for small images."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import relu


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
