"""From a data set's name to the data set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ....compress.builder.spelling import did_you_mean
from ..models import ModelConfig
from ..sample import SampleShape
from .dataset import Dataset
from .images import cifar10, digits, mnist, patterns
from .packages import packages
from .text import BYTES, text

DATA: dict[str, Callable[[Path | None, int], Dataset]] = {
    "text": text,
    "packages": packages,
    "digits": digits,
    "patterns": patterns,
    "mnist": mnist,
    "cifar10": cifar10,
}


@dataclass(frozen=True)
class DataConfig:
    """A data set, and the place where it lies."""

    name: str = "text"
    """data set: text, packages (the text of installed packages), digits, patterns (generated images), mnist or
    cifar10"""
    path: str | None = None
    """file or folder with your own text, or the folder in which torchvision keeps mnist or cifar10"""

    def __post_init__(self) -> None:
        if self.name not in DATA:
            hint = did_you_mean(self.name, DATA)
            raise ValueError(f"unknown data {self.name!r}{hint}; there are: {', '.join(DATA)}")
        if self.path is not None and not Path(self.path).exists():
            raise ValueError(f"--data.path {self.path} does not exist: name a file or folder that does")


def data_shape(name: str | None, model: ModelConfig) -> SampleShape:
    """Return the shape of a data set's samples without loading it; None is text or cifar10, whichever the model reads."""
    return {
        "text": SampleShape("text", "tokens", BYTES, (model.context,)),
        "packages": SampleShape("packages", "tokens", BYTES, (model.context,)),
        "digits": SampleShape("digits", "images", 10, (1, 8, 8)),
        "patterns": SampleShape("patterns", "images", 10, (1, 8, 8)),
        "mnist": SampleShape("mnist", "images", 10, (1, 28, 28)),
        "cifar10": SampleShape("cifar10", "images", 10, (3, 32, 32)),
    }[name or ("text" if model.kind == "tokens" else "cifar10")]


def load_dataset(config: DataConfig, model: ModelConfig) -> Dataset:
    """The data for a model, which decides how many tokens a sample has.

    Raises ValueError where the data are missing or too few.
    """
    return DATA[config.name](Path(config.path) if config.path else None, model.context)
