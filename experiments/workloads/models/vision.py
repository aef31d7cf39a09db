"""Torchvision's image classifiers."""

from __future__ import annotations

import torchvision
from torch import Tensor, nn
from torch.nn.functional import interpolate

from ....compress.builder.spelling import did_you_mean


class Classifier(nn.Module):
    """A torchvision classifier for images of any size and number of channels."""

    def __init__(self, network: nn.Module, image_size: int) -> None:
        super().__init__()
        self.network = network
        self.image_size = image_size

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes)."""
        size = (self.image_size, self.image_size)
        enlarged = interpolate(images, size, mode="bilinear") if images.shape[-2:] != size else images
        logits: Tensor = self.network(enlarged.expand(-1, 3, -1, -1))
        return logits


def classifier(name: str, classes: int) -> nn.Module:
    """A network with random weights. Raises ValueError for a name torchvision does not know, or with auxiliary outputs."""
    names = torchvision.models.list_models(module=torchvision.models)
    if name not in names:
        raise ValueError(f"torchvision has no classifier {name!r}{did_you_mean(name, names)}")
    network: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes)
    if getattr(network, "aux_logits", False):
        raise ValueError(f"{name} has auxiliary outputs, which no loss here uses; take another")
    return network
