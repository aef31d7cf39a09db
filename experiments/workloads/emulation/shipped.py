"""The traces that come with gradwire, made from the definitions of the models when they are asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ....compress.builder.spelling import did_you_mean
from ..models.networks import ResNet18
from .definitions import BACKWARD_OF_FORWARD, LayerDefinition, bert, resnet, sockeye, timed, vgg19
from .recording import layers_of
from .trace import Trace

SUSTAINED = 8e12  # operations a second: what ResNet-50's published 0.097 s a step come to
BY_OPERATIONS = "distributed by FLOPs, backward twice forward, total scaled to {seconds:.3g} s per step: "
PUBLISHED = BY_OPERATIONS + "published for this batch on a V100, in the README of PyTorch's DDP benchmark"
SUSTAINED_ASSUMED = BY_OPERATIONS + "assumption, 8 TFLOP/s sustained"
ASSUMED = BY_OPERATIONS + "assumption"
SCALE_SIGN = "@"


@dataclass(frozen=True)
class Shipped:
    """A definition, the samples a step, the time a step (None: by `SUSTAINED`), and how it was got, in words."""

    definition: Callable[[], Iterable[LayerDefinition]]
    batch_size: int
    seconds: float | None = None
    source: str = SUSTAINED_ASSUMED


def inception_v3() -> list[LayerDefinition]:
    """Inception v3 for 299 x 299 images and 1,000 classes, without its auxiliary classifier (Szegedy et al. 2016)."""
    from torchvision import models  # here, since it is optional

    with torch.device("meta"):
        return layers_of(models.inception_v3(aux_logits=False, init_weights=False), torch.zeros(1, 3, 299, 299))


def transformer() -> list[LayerDefinition]:
    """A transformer on bytes, of torch's encoder layers with normalisation first, on 32 tokens a sample."""
    with torch.device("meta"):
        block = nn.TransformerEncoderLayer(512, 8, 2048, 0.0, batch_first=True, norm_first=True)
        blocks = nn.TransformerEncoder(block, 6, enable_nested_tensor=False)
        model = nn.Sequential(nn.Embedding(256, 512), blocks, nn.Linear(512, 256))
        return layers_of(model, torch.zeros(1, 32, dtype=torch.int64))


def resnet18_cifar() -> list[LayerDefinition]:
    """ResNet-18 as this package builds it for CIFAR-10."""
    with torch.device("meta"):
        return layers_of(ResNet18(channels=3, classes=10), torch.zeros(1, 3, 32, 32))


SHIPPED = {
    "resnet50": Shipped(lambda: resnet((3, 4, 6, 3)), 32, 0.097, PUBLISHED),
    "resnet101": Shipped(lambda: resnet((3, 4, 23, 3)), 32, 0.162, PUBLISHED),
    "resnext50_32x4d": Shipped(lambda: resnet((3, 4, 6, 3), 32, 4), 32, 0.145, PUBLISHED),
    "resnext101_32x8d": Shipped(lambda: resnet((3, 4, 23, 3), 32, 8), 32, 0.415, PUBLISHED),
    "inceptionv3": Shipped(inception_v3, 32),
    "vgg19": Shipped(vgg19, 32),
    "sockeye": Shipped(lambda: sockeye(17191, 7709, 512, 1024, 20), 64, 0.4, ASSUMED),
    "bert-base": Shipped(lambda: bert(12, 768, 128), 8),
    "bert-large": Shipped(lambda: bert(24, 1024, 128), 8),
    "gpt-20m": Shipped(transformer, 4, 0.05, ASSUMED),
    "resnet18-cifar": Shipped(resnet18_cifar, 128),
}


def load_trace(name_or_path: str) -> Trace:
    """Load a trace that comes with gradwire, or a JSON file. `@SECONDS` behind it scales it to that time per step.

    Args:
        name_or_path: such as "resnet50", "resnet50@0.2" or "mine.json".

    Returns:
        The trace.

    Raises:
        ValueError: there is no such trace.

    >>> load_trace("resnet50@0.2").elements
    25557032
    """
    base, sign, seconds = name_or_path.rpartition(SCALE_SIGN)
    if not sign or Path(name_or_path).is_file():
        return _unscaled(name_or_path)
    try:
        total = float(seconds)
    except ValueError:
        raise ValueError(
            f"behind {SCALE_SIGN} stand the seconds of computation a step, as in resnet50@0.1; got {name_or_path!r}"
        ) from None
    return _unscaled(base).scaled(total)


def _unscaled(name: str) -> Trace:
    if name in SHIPPED:
        return _made(name)
    if Path(name).expanduser().is_file():
        return Trace.read(Path(name).expanduser())
    hint = did_you_mean(name, SHIPPED)
    raise ValueError(f"no trace {name!r}{hint}; there are: {', '.join(SHIPPED)}, or the name of a JSON file")


@functools.cache
def _made(name: str) -> Trace:
    shipped = SHIPPED[name]
    layers = list(shipped.definition())
    operations = (1 + BACKWARD_OF_FORWARD) * shipped.batch_size * sum(layer.operations for layer in layers)
    seconds = shipped.seconds or operations / SUSTAINED
    return timed(name, shipped.source.format(seconds=seconds), shipped.batch_size, layers, seconds)
