"""Layers with their parameters and floating-point operations: the definitions of models, and traces from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from .trace import Layer, Shape, Trace

BACKWARD_OF_FORWARD = 2  # operations: the gradients of the weights and those of the inputs


@dataclass(frozen=True)
class LayerDefinition:
    """A layer of a model's definition: its parameters, and the operations of its forward for one sample."""

    name: str
    parameters: dict[str, Shape]
    operations: float = 0.0


def timed(name: str, source: str, batch_size: int, definitions: Iterable[LayerDefinition], seconds: float) -> Trace:
    """Return the trace of layers that share the seconds of a step by their operations, backward twice forward."""
    chosen = [each for each in definitions if each.parameters or each.operations]
    second = seconds / (1 + BACKWARD_OF_FORWARD) / sum(each.operations for each in chosen)
    forward = [(each, each.operations * second) for each in chosen]
    layers = (Layer(each.name, each.parameters, time, time * BACKWARD_OF_FORWARD) for each, time in forward)
    return Trace(name, source, batch_size, tuple(layers))


def convolution(
    name: str, inside: int, outside: int, size: int, side: int, *, groups: int = 1, bias: bool = False
) -> LayerDefinition:
    """A convolution with a kernel of `size` x `size` whose output has `side` x `side` positions."""
    weight = (outside, inside // groups, size, size)
    shapes: dict[str, Shape] = {"weight": weight, "bias": (outside,)} if bias else {"weight": weight}
    return LayerDefinition(name, shapes, 2 * prod(weight) * side * side)


def linear(name: str, inside: int, outside: int, positions: int = 1) -> LayerDefinition:
    """A linear layer with a bias, applied to each of `positions`."""
    return LayerDefinition(name, {"weight": (outside, inside), "bias": (outside,)}, 2 * inside * outside * positions)


def norm(name: str, width: int) -> LayerDefinition:
    """A batch or layer normalisation; its operations are not counted."""
    return LayerDefinition(name, {"weight": (width,), "bias": (width,)})


def embedding(name: str, rows: int, width: int) -> LayerDefinition:
    """A table of which a token takes a row: no operations."""
    return LayerDefinition(name, {"weight": (rows, width)})


def lstm(name: str, inside: int, width: int, positions: int, *, bidirectional: bool = False) -> LayerDefinition:
    """One layer of an LSTM over `positions` tokens, with torch's two biases."""
    shapes: dict[str, Shape] = {"weight_ih": (4 * width, inside), "weight_hh": (4 * width, width)}
    shapes |= {"bias_ih": (4 * width,), "bias_hh": (4 * width,)}
    ways = ("_l0", "_l0_reverse") if bidirectional else ("_l0",)
    operations = 2 * 4 * width * (inside + width) * positions * len(ways)
    return LayerDefinition(name, {f"{part}{way}": shape for way in ways for part, shape in shapes.items()}, operations)


def resnet(blocks: tuple[int, ...], groups: int = 1, group_width: int = 64) -> Iterator[LayerDefinition]:
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


def vgg19() -> Iterator[LayerDefinition]:
    """VGG-19 without batch normalisation, for 224 x 224 images and 1,000 classes (Simonyan and Zisserman 2015)."""
    inside, position = 3, 0
    for stage, (outside, count) in enumerate(((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))):
        for _ in range(count):
            yield convolution(f"features.{position}", inside, outside, 3, 224 // 2**stage, bias=True)
            inside, position = outside, position + 2  # an activation stands behind each
        position += 1  # and a pooling behind each stage
    for name, sizes in (("0", (512 * 7 * 7, 4096)), ("3", (4096, 4096)), ("6", (4096, 1000))):
        yield linear(f"classifier.{name}", *sizes)


def bert(blocks: int, width: int, tokens: int) -> Iterator[LayerDefinition]:
    """BERT for 30,522 word pieces, with its pooler and without a head, on `tokens` tokens a sample (Devlin et al. 2019)."""
    for name, rows in (("word", 30522), ("position", 512), ("token_type", 2)):
        yield LayerDefinition(f"embeddings.{name}_embeddings", {"weight": (rows, width)})
    yield norm("embeddings.LayerNorm", width)
    for block in range(blocks):
        name = f"encoder.layer.{block}"
        for part in ("query", "key", "value"):
            yield linear(f"{name}.attention.self.{part}", width, width, tokens)
        scores = 4 * tokens * tokens * width  # and values weighed by them
        yield LayerDefinition(f"{name}.attention.self", {}, scores)
        yield linear(f"{name}.attention.output.dense", width, width, tokens)
        yield norm(f"{name}.attention.output.LayerNorm", width)
        yield linear(f"{name}.intermediate.dense", width, 4 * width, tokens)
        yield linear(f"{name}.output.dense", 4 * width, width, tokens)
        yield norm(f"{name}.output.LayerNorm", width)
    yield linear("pooler.dense", width, width)


def sockeye(source_words: int, target_words: int, embedded: int, width: int, tokens: int) -> Iterator[LayerDefinition]:
    """An encoder-decoder for translation: a bidirectional LSTM, an LSTM with attention, one layer each, as the first
    version of Sockeye trained by default (Hieber et al. 2017), on `tokens` words of either language a sample.
    """
    yield embedding("encoder.embedding", source_words, embedded)
    yield lstm("encoder.lstm", embedded, width // 2, tokens, bidirectional=True)
    yield embedding("decoder.embedding", target_words, embedded)
    yield lstm("decoder.lstm", embedded + width, width, tokens)
    yield linear("decoder.attention.query", width, width // 4, tokens)
    yield linear("decoder.attention.key", width, width // 4, tokens)
    yield LayerDefinition(
        "decoder.attention.score", {"weight": (1, width // 4)}, 2 * (width // 4 + width) * tokens * tokens
    )
    yield linear("decoder.hidden", 2 * width, width, tokens)
    yield linear("decoder.output", width, target_words, tokens)
