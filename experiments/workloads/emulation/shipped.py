"""The traces that come with gradwire, made from the definitions of the models when they are asked for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from .trace import BACKWARD_OF_FORWARD, BY_OPERATIONS, Layer, Shape, Trace

SUSTAINED = 8e12  # operations a second: what ResNet-50's published 0.097 s a step come to
PUBLISHED = BY_OPERATIONS + "published for this batch on a V100, in the README of PyTorch's DDP benchmark"
SUSTAINED_ASSUMED = BY_OPERATIONS + "assumption, 8 TFLOP/s sustained"
ASSUMED = BY_OPERATIONS + "assumption"
SCALE_SIGN = "@"


@dataclass(frozen=True)
class Work:
    """A layer of a model's definition: its parameters, and the operations of its forward for one sample."""

    name: str
    parameters: dict[str, Shape]
    operations: float = 0.0


Definition = Callable[[], Iterator[Work]]


@dataclass(frozen=True)
class Shipped:
    """A definition, the samples a step, the time a step (None: by `SUSTAINED`), and how it was got, in words."""

    definition: Definition
    batch_size: int
    seconds: float | None = None
    source: str = SUSTAINED_ASSUMED


def convolution(
    name: str, inside: int, outside: int, size: int, side: int, *, groups: int = 1, bias: bool = False
) -> Work:
    """A convolution with a `size` x `size` kernel whose output has `side` x `side` positions."""
    weight = (outside, inside // groups, size, size)
    return Work(name, {"weight": weight, **({"bias": (outside,)} if bias else {})}, 2 * prod(weight) * side * side)


def linear(name: str, inside: int, outside: int, positions: int = 1) -> Work:
    """A linear layer with a bias, applied to each of `positions`."""
    return Work(name, {"weight": (outside, inside), "bias": (outside,)}, 2 * inside * outside * positions)


def norm(name: str, width: int) -> Work:
    """A batch or layer normalisation; its operations are not counted."""
    return Work(name, {"weight": (width,), "bias": (width,)})


def resnet(blocks: tuple[int, ...], groups: int = 1, group_width: int = 64) -> Iterator[Work]:
    """A ResNet or ResNeXt of bottleneck blocks for 224 x 224 images and 1,000 classes (He et al. 2016, Xie et al. 2017)."""
    yield convolution("conv1", 3, 64, 7, 112)
    yield norm("bn1", 64)
    inside, side = 64, 56
    for stage, count in enumerate(blocks):
        width, outside = 64 * 2**stage * group_width // 64 * groups, 256 * 2**stage
        for block in range(count):
            name = f"layer{stage + 1}.{block}"
            before, side = side, 56 // 2**stage
            yield convolution(f"{name}.conv1", inside, width, 1, before)
            yield norm(f"{name}.bn1", width)
            yield convolution(f"{name}.conv2", width, width, 3, side, groups=groups)
            yield norm(f"{name}.bn2", width)
            yield convolution(f"{name}.conv3", width, outside, 1, side)
            yield norm(f"{name}.bn3", outside)
            if block == 0:
                yield convolution(f"{name}.downsample.0", inside, outside, 1, side)
                yield norm(f"{name}.downsample.1", outside)
            inside = outside
    yield linear("fc", inside, 1000)


def vgg19() -> Iterator[Work]:
    """VGG-19 without batch normalisation, for 224 x 224 images and 1,000 classes (Simonyan and Zisserman 2015)."""
    inside, position = 3, 0
    for stage, (outside, count) in enumerate(((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))):
        for _ in range(count):
            yield convolution(f"features.{position}", inside, outside, 3, 224 // 2**stage, bias=True)
            inside, position = outside, position + 2  # an activation stands behind each
        position += 1  # and a pooling behind each stage
    for name, sizes in (("0", (512 * 7 * 7, 4096)), ("3", (4096, 4096)), ("6", (4096, 1000))):
        yield linear(f"classifier.{name}", *sizes)


def bert(blocks: int, width: int, tokens: int) -> Iterator[Work]:
    """BERT for 30,522 word pieces, with its pooler and without a head, on `tokens` tokens a sample (Devlin et al. 2019)."""
    for name, rows in (("word", 30522), ("position", 512), ("token_type", 2)):
        yield Work(f"embeddings.{name}_embeddings", {"weight": (rows, width)})
    yield norm("embeddings.LayerNorm", width)
    for block in range(blocks):
        name = f"encoder.layer.{block}"
        for part in ("query", "key", "value"):
            yield linear(f"{name}.attention.self.{part}", width, width, tokens)
        yield Work(f"{name}.attention.self", {}, 4 * tokens * tokens * width)  # scores, and values weighed by them
        yield linear(f"{name}.attention.output.dense", width, width, tokens)
        yield norm(f"{name}.attention.output.LayerNorm", width)
        yield linear(f"{name}.intermediate.dense", width, 4 * width, tokens)
        yield linear(f"{name}.output.dense", 4 * width, width, tokens)
        yield norm(f"{name}.output.LayerNorm", width)
    yield linear("pooler.dense", width, width)


def transformer(blocks: int, width: int, tokens: int) -> Iterator[Work]:
    """A transformer on bytes, of torch's encoder layers with normalisation first, on `tokens` tokens a sample."""
    yield Work("0", {"weight": (256, width)})
    for block in range(blocks):
        name = f"1.layers.{block}"
        yield norm(f"{name}.norm1", width)
        projections = {"in_proj_weight": (3 * width, width), "in_proj_bias": (3 * width,)}
        yield Work(
            f"{name}.self_attn",
            {**projections, "out_proj.weight": (width, width), "out_proj.bias": (width,)},
            8 * width * width * tokens + 4 * tokens * tokens * width,
        )
        yield norm(f"{name}.norm2", width)
        yield linear(f"{name}.linear1", width, 4 * width, tokens)
        yield linear(f"{name}.linear2", 4 * width, width, tokens)
    yield linear("2", width, 256, tokens)


def resnet18_cifar() -> Iterator[Work]:
    """ResNet-18 as this package builds it for CIFAR-10."""
    yield convolution("0.0", 3, 64, 3, 32)
    yield norm("0.1", 64)
    inside = 64
    for stage, outside in enumerate((64, 128, 256, 512)):
        side = 32 // 2**stage
        for block in range(2):
            name = f"{2 + 2 * stage + block}"
            parts = {"first": (inside, 3), "second": (outside, 3), "shortcut": (inside, 1)}
            for part, (width, size) in list(parts.items())[: 3 if inside != outside else 2]:
                yield convolution(f"{name}.{part}.0", width, outside, size, side)
                yield norm(f"{name}.{part}.1", outside)
            inside = outside
    yield linear("12", 512, 10)


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
    "vgg19": Shipped(vgg19, 32),
    "bert-base": Shipped(lambda: bert(12, 768, 128), 8),
    "bert-large": Shipped(lambda: bert(24, 1024, 128), 8),
    "gpt-20m": Shipped(lambda: transformer(6, 512, 32), 4, 0.05, ASSUMED),
    "resnet18-cifar": Shipped(resnet18_cifar, 128),
}


def trace_names() -> list[str]:
    """The traces that come with gradwire."""
    return list(SHIPPED)


def load_trace(name_or_path: str) -> Trace:
    """A trace that comes with gradwire, or one in a JSON file; with `@SECONDS` behind it, scaled to that time a step.

    Raises ValueError for what is neither.

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
    near = difflib.get_close_matches(name, SHIPPED, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ValueError(f"no trace {name!r}{hint}; there are: {', '.join(SHIPPED)}, or the name of a JSON file")
