"""The traces that come with gradwire, made from the definitions of the models when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ....compress.builder.options import did_you_mean
from .definitions import LayerDefinition, bert, inception_v3, resnet, resnet18_cifar, sockeye, transformer, vgg19
from .trace import BACKWARD_OF_FORWARD, BY_OPERATIONS, Layer, Trace

SUSTAINED = 8e12  # operations a second: what ResNet-50's published 0.097 s a step come to
PUBLISHED = BY_OPERATIONS + "published for this batch on a V100, in the README of PyTorch's DDP benchmark"
SUSTAINED_ASSUMED = BY_OPERATIONS + "assumption, 8 TFLOP/s sustained"
ASSUMED = BY_OPERATIONS + "assumption"
SCALE_SIGN = "@"
Definition = Callable[[], Iterator[LayerDefinition]]


@dataclass(frozen=True)
class Shipped:
    """A definition, the samples a step, the time a step (None: by `SUSTAINED`), and how it was got, in words."""

    definition: Definition
    batch_size: int
    seconds: float | None = None
    source: str = SUSTAINED_ASSUMED


def defined(name: str, shipped: Shipped) -> Trace:
    """The trace of a definition."""
    works = list(shipped.definition())
    operations = sum(work.operations for work in works) * (1 + BACKWARD_OF_FORWARD)
    seconds = shipped.seconds or operations * shipped.batch_size / SUSTAINED
    second = seconds / operations
    layers = (
        Layer(work.name, work.parameters, work.operations * second, work.operations * second * BACKWARD_OF_FORWARD)
        for work in works
    )
    return Trace(name, shipped.source.format(seconds=seconds), shipped.batch_size, tuple(layers))


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
    "gpt-20m": Shipped(lambda: transformer(6, 512, 32), 4, 0.05, ASSUMED),
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
        return defined(name, SHIPPED[name])
    if Path(name).expanduser().is_file():
        return Trace.read(Path(name).expanduser())
    hint = did_you_mean(name, SHIPPED)
    raise ValueError(f"no trace {name!r}{hint}; there are: {', '.join(SHIPPED)}, or the name of a JSON file")
