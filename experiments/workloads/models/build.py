"""From a model's name and sizes to the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from torch import nn

from ....compress.builder.spelling import did_you_mean
from ..sample import SampleShape
from .networks import GPT, LSTM, MLP, ResNet18
from .own import IN_FILE, own_file, own_training

TORCHVISION = "torchvision:"
# torchvision's, by these names alone too
VISION = ("resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d", "vgg19")
SIZED = {  # names of a gpt that say its parameters; the second has GPT-2's smallest sizes, and an output layer of its own
    "gpt-0.9m": {"width": 128, "layers": 4, "vocabulary": 256},
    "gpt-162m": {"width": 768, "layers": 12, "vocabulary": 50257},
}
CIFAR10 = ((3, 32, 32), 10)  # the shape of an image and the number of classes where no data set says otherwise


@dataclass(frozen=True)
class ModelConfig:
    """A model and its sizes; a size that is null is the model's own."""

    name: str = "gpt-0.9m"
    """model: gpt-0.9m, gpt-162m, gpt (with sizes of your own), resnet18-cifar, lstm, mlp, resnet50, resnet101,
    resnext50_32x4d, resnext101_32x8d, vgg19 or torchvision:NAME; in advise and plan also your FILE.py:FUNCTION"""
    width: int | None = None
    """width of the model: embedding size (gpt: 128, lstm: 650), hidden units (mlp: 256) or first channels
    (resnet18-cifar: 64)"""
    layers: int | None = None
    """number of layers (gpt: 4, lstm: 3, mlp: 2) or of blocks per stage (resnet18-cifar: 2)"""
    heads: int | None = None
    """number of gpt's attention heads; one per 64 of the width if not given"""
    vocabulary: int | None = None
    """number of tokens that gpt (256) or lstm (28869) knows"""
    context: int = 128
    """number of tokens per sample"""
    image_size: int = 64
    """side in pixels to which torchvision's models enlarge images"""

    def __post_init__(self) -> None:
        for size in ("width", "layers", "heads", "vocabulary", "context", "image_size"):
            value = getattr(self, size)
            if value is not None and value < 1:
                raise ValueError(f"model.{size} is at least 1, got {value}")
        for size, value in SIZED.get(self.name, {}).items():
            if getattr(self, size) not in (None, value):
                raise ValueError(f"{self.name} has model.{size} {value}, got {getattr(self, size)}: name gpt to choose")
        if self.own:
            own_file(self.name)
            if any(getattr(self, each.name) != each.default for each in fields(self) if each.name != "name"):
                raise ValueError(f"{self.name} has its own sizes: leave out --model.width and the like")
            return
        if self.name in VISION:
            object.__setattr__(self, "name", f"{TORCHVISION}{self.name}")
        if self.family not in MODELS and not self.name.startswith(TORCHVISION):
            hint = did_you_mean(self.name, (*MODELS, *SIZED, *VISION))
            raise ValueError(f"unknown model {self.name!r}{hint}; there are: {', '.join(model_names())}")

    @property
    def own(self) -> bool:
        """True for a user's FILE.py:FUNCTION, which has its own sizes and batch."""
        return IN_FILE in self.name

    def refuse_own(self, command: str) -> None:
        """Raise ValueError for a user's FILE.py:FUNCTION, which has no data set to evaluate on."""
        if self.own:
            raise ValueError(
                f"{command} takes no model of a file, which has one batch and no validation data: ask gradwire advise "
                f"--model {self.name} or gradwire bench --models {self.name}, or run your script by gradwire try"
            )

    @property
    def kind(self) -> str:
        """The samples that the model reads: `tokens` or `images`."""
        return MODELS[self.family].kind if self.family in MODELS else "images"

    @property
    def family(self) -> str:
        """The name without a size."""
        return "gpt" if self.name in SIZED else self.name


@dataclass(frozen=True)
class Model:
    """A kind of samples, and a function that builds the model for a data set (None: for that of its paper)."""

    kind: str
    build: Callable[[ModelConfig, SampleShape | None], nn.Module]


def _gpt(config: ModelConfig, dataset: SampleShape | None) -> nn.Module:
    sizes = SIZED.get(config.name, {})
    width = config.width or sizes.get("width", 128)
    return GPT(
        vocabulary=config.vocabulary or sizes.get("vocabulary") or (dataset.classes if dataset else 256),
        context=config.context,
        width=width,
        layers=config.layers or sizes.get("layers", 4),
        heads=config.heads or max(1, width // 64),
    )


def _lstm(config: ModelConfig, dataset: SampleShape | None) -> nn.Module:
    return LSTM(config.vocabulary or 28869, config.width or 650, config.layers or 3)


def _mlp(config: ModelConfig, dataset: SampleShape | None) -> nn.Module:
    shape, classes = _pictures(dataset)
    return MLP(shape, classes, config.width or 256, config.layers or 2)


def _resnet18(config: ModelConfig, dataset: SampleShape | None) -> nn.Module:
    (channels, _, _), classes = _pictures(dataset)
    return ResNet18(channels, classes, config.width or 64, config.layers or 2)


def _pictures(dataset: SampleShape | None) -> tuple[tuple[int, ...], int]:
    return (dataset.input_shape, dataset.classes) if dataset else CIFAR10


MODELS = {
    "gpt": Model("tokens", _gpt),
    "lstm": Model("tokens", _lstm),
    "mlp": Model("images", _mlp),
    "resnet18-cifar": Model("images", _resnet18),
}


def model_names() -> list[str]:
    """Return the values that `ModelConfig.name` may have."""
    return [*MODELS, *SIZED, *VISION, f"{TORCHVISION}NAME"]


def build_model(config: ModelConfig, dataset: SampleShape | None = None) -> nn.Module:
    """A model with random weights from torch's global generator, on the current default device (meta costs nothing).

    Tokens (batch, context) give logits (batch, context, vocabulary); images (batch, channels, height, width) give logits
    (batch, classes). Raises ValueError for a model that cannot read the data set.

    >>> sum(parameter.numel() for parameter in build_model(ModelConfig("resnet18-cifar")).parameters())
    11173962
    """
    if config.own:
        return own_training(config.name)[0]
    if dataset is not None and dataset.kind != config.kind:
        fitting = [name for name, model in MODELS.items() if model.kind == dataset.kind]
        raise ValueError(
            f"{config.name} reads {config.kind}, and the data {dataset.name!r} are {dataset.kind}; "
            f"models for them: {', '.join(fitting)}"
        )
    if dataset is not None and config.kind == "tokens" and (config.vocabulary or dataset.classes) < dataset.classes:
        raise ValueError(
            f"model.vocabulary is at least {dataset.classes} for {dataset.name!r}, got {config.vocabulary}"
        )
    if config.family in MODELS:
        return MODELS[config.family].build(config, dataset)
    from .vision import Classifier, classifier  # here, since torchvision is optional

    network = classifier(config.name.removeprefix(TORCHVISION), _pictures(dataset)[1])
    return Classifier(network, config.image_size)
