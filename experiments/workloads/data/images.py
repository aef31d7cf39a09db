"""Images with classes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import TensorDataset

from .dataset import Dataset

HELD_OUT = 5  # one sample in five
CLASSES, GENERATED, SIDE, SHIFT = 10, 10240, 8, 1  # of the generated patterns
NOISE = 0.6  # standard deviation; that of the patterns is below 1
WRONG = 0.2  # the part of the labels that is drawn anew


def digits(path: Path | None, context: int) -> Dataset:
    """Scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, which come with the library."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().div(8).sub(1).unsqueeze(1)
    labels = torch.from_numpy(bunch.target).long()
    held_out = torch.arange(len(labels)) % HELD_OUT == 0
    parts = [(images[chosen], labels[chosen]) for chosen in (~held_out, held_out)]
    return _dataset("digits", parts, "scikit-learn")


def patterns(path: Path | None, context: int) -> Dataset:
    """Generated images of 8 x 8 pixels: a class is a smooth pattern, moved at random, under noise; the same everywhere.

    One label in five is drawn anew, so that the loss stays well above zero and differences of it can be told.
    """
    private = torch.Generator().manual_seed(0)
    coarse = torch.randn(CLASSES, 1, 4, 4, generator=private)
    smooth = functional.interpolate(coarse, scale_factor=SIDE // 4, mode="bilinear")
    labels = torch.randint(CLASSES, (GENERATED,), generator=private)
    down, right = torch.randint(-SHIFT, SHIFT + 1, (2, GENERATED, SIDE), generator=private)[..., :1]
    rows, columns = ((torch.arange(SIDE) + shift) % SIDE for shift in (down, right))
    moved = smooth[labels, 0][torch.arange(GENERATED)[:, None, None], rows[:, :, None], columns[:, None, :]]
    images = (moved + NOISE * torch.randn(moved.shape, generator=private)).unsqueeze(1)
    wrong = torch.rand(GENERATED, generator=private) < WRONG
    labels = torch.where(wrong, torch.randint(CLASSES, (GENERATED,), generator=private), labels)
    cut = GENERATED - GENERATED // HELD_OUT
    return _dataset("patterns", [(images[:cut], labels[:cut]), (images[cut:], labels[cut:])], "generated")


def mnist(path: Path | None, context: int) -> Dataset:
    """MNIST as torchvision keeps it on disk."""
    from torchvision.datasets import MNIST

    return _dataset("mnist", [_on_disk(MNIST, path, train) for train in (True, False)], str(path))


def cifar10(path: Path | None, context: int) -> Dataset:
    """CIFAR-10 as torchvision keeps it on disk."""
    from torchvision.datasets import CIFAR10

    return _dataset("cifar10", [_on_disk(CIFAR10, path, train) for train in (True, False)], str(path))


def _on_disk(kind: type, path: Path | None, train: bool) -> tuple[Tensor, Tensor]:
    """Images (samples, channels, height, width) from -1 to 1, and their classes."""
    if path is None:
        raise ValueError(f"{kind.__name__} lies in a folder of yours: name it with --data.path; nothing is downloaded")
    try:
        stored = kind(path, train=train, download=False)
    except RuntimeError as error:
        raise ValueError(f"{path} does not hold torchvision's {kind.__name__}: {error}") from error
    images = torch.as_tensor(stored.data).float().div(127.5).sub(1)
    images = images.unsqueeze(1) if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()
    return images, torch.as_tensor(stored.targets)


def _dataset(name: str, parts: list[tuple[Tensor, Tensor]], source: str) -> Dataset:
    shape = tuple(parts[0][0].shape[1:])
    train, held_out = (TensorDataset(*part) for part in parts)
    return Dataset(name, "images", 10, shape, train, held_out, source)  # type: ignore[arg-type]
