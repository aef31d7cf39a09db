"""Definitions of models, as their papers and libraries have them: layers with parameters and floating-point operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from .trace import Shape


@dataclass(frozen=True)
class LayerDefinition:
    """A layer of a model's definition: its parameters, and the operations of its forward for one sample."""

    name: str
    parameters: dict[str, Shape]
    operations: float = 0.0


def convolution(
    name: str,
    inside: int,
    outside: int,
    size: int | tuple[int, int],
    side: int,
    *,
    groups: int = 1,
    bias: bool = False,
) -> LayerDefinition:
    """A convolution with a kernel of `size` (a side, or rows and columns) whose output has `side` x `side` positions."""
    rows, columns = (size, size) if isinstance(size, int) else size
    weight = (outside, inside // groups, rows, columns)
    return LayerDefinition(
        name, {"weight": weight, **({"bias": (outside,)} if bias else {})}, 2 * prod(weight) * side * side
    )


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


def resnet18_cifar() -> Iterator[LayerDefinition]:
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


Unit = tuple[str, int, int | tuple[int, int], int]  # branch and place in it, channels, kernel, side of the output
AGAIN = ("branch3x3_2b", "branch3x3dbl_3b")  # beside the unit before them, not behind it


def inception_a(pooled: int) -> list[Unit]:
    """Four branches at 35 x 35 positions; `pooled`: channels of the last."""
    return [
        ("branch1x1", 64, 1, 35),
        ("branch5x5_1", 48, 1, 35),
        ("branch5x5_2", 64, 5, 35),
        ("branch3x3dbl_1", 64, 1, 35),
        ("branch3x3dbl_2", 96, 3, 35),
        ("branch3x3dbl_3", 96, 3, 35),
        ("branch_pool", pooled, 1, 35),
    ]


def inception_c(width: int) -> list[Unit]:
    """Convolutions with 7 x 1 and 1 x 7 kernels at 17 x 17 positions."""
    doubled: list[tuple[int, int | tuple[int, int]]] = [
        (width, 1),
        (width, (7, 1)),
        (width, (1, 7)),
        (width, (7, 1)),
        (192, (1, 7)),
    ]
    return [
        ("branch1x1", 192, 1, 17),
        ("branch7x7_1", width, 1, 17),
        ("branch7x7_2", width, (1, 7), 17),
        ("branch7x7_3", 192, (7, 1), 17),
        *((f"branch7x7dbl_{place}", channels, kernel, 17) for place, (channels, kernel) in enumerate(doubled, 1)),
        ("branch_pool", 192, 1, 17),
    ]


INCEPTION_B: list[Unit] = [
    ("branch3x3", 384, 3, 17),
    ("branch3x3dbl_1", 64, 1, 35),
    ("branch3x3dbl_2", 96, 3, 35),
    ("branch3x3dbl_3", 96, 3, 17),
]
INCEPTION_D: list[Unit] = [
    ("branch3x3_1", 192, 1, 17),
    ("branch3x3_2", 320, 3, 8),
    ("branch7x7x3_1", 192, 1, 17),
    ("branch7x7x3_2", 192, (1, 7), 17),
    ("branch7x7x3_3", 192, (7, 1), 17),
    ("branch7x7x3_4", 192, 3, 8),
]
INCEPTION_E: list[Unit] = [
    ("branch1x1", 320, 1, 8),
    ("branch3x3_1", 384, 1, 8),
    ("branch3x3_2a", 384, (1, 3), 8),
    ("branch3x3_2b", 384, (3, 1), 8),
    ("branch3x3dbl_1", 448, 1, 8),
    ("branch3x3dbl_2", 384, 3, 8),
    ("branch3x3dbl_3a", 384, (1, 3), 8),
    ("branch3x3dbl_3b", 384, (3, 1), 8),
    ("branch_pool", 192, 1, 8),
]
INCEPTION: list[tuple[str, int, list[Unit]]] = [  # name, channels that come in, units
    ("Mixed_5b", 192, inception_a(32)),
    ("Mixed_5c", 256, inception_a(64)),
    ("Mixed_5d", 288, inception_a(64)),
    ("Mixed_6a", 288, INCEPTION_B),
    *(
        (f"Mixed_6{letter}", 768, inception_c(width))
        for letter, width in zip("bcde", (128, 160, 160, 192), strict=True)
    ),
    ("Mixed_7a", 768, INCEPTION_D),
    ("Mixed_7b", 1280, INCEPTION_E),
    ("Mixed_7c", 2048, INCEPTION_E),
]


def inception_v3() -> Iterator[LayerDefinition]:
    """Inception v3 for 299 x 299 images and 1,000 classes, without its auxiliary classifier (Szegedy et al. 2016)."""
    stem: list[Unit] = [("1a_3x3", 32, 3, 149), ("2a_3x3", 32, 3, 147), ("2b_3x3", 64, 3, 147)]
    stem += [("3b_1x1", 80, 1, 73), ("4a_3x3", 192, 3, 71)]
    inside = 3
    for name, outside, kernel, side in stem:
        yield from inception_unit(f"Conv2d_{name}", inside, outside, kernel, side)
        inside = outside
    for block, channels, units in INCEPTION:
        source = before = channels
        for name, outside, kernel, side in units:
            first = "_" not in name or name.endswith(("_1", "_pool"))  # of its branch
            source = channels if first else source if name in AGAIN else before
            before = outside
            yield from inception_unit(f"{block}.{name}", source, outside, kernel, side)
    yield linear("fc", 2048, 1000)


def inception_unit(
    name: str, inside: int, outside: int, kernel: int | tuple[int, int], side: int
) -> Iterator[LayerDefinition]:
    """A convolution and its normalisation."""
    yield convolution(f"{name}.conv", inside, outside, kernel, side)
    yield norm(f"{name}.bn", outside)


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


def transformer(blocks: int, width: int, tokens: int) -> Iterator[LayerDefinition]:
    """A transformer on bytes, of torch's encoder layers with normalisation first, on `tokens` tokens a sample."""
    yield LayerDefinition("0", {"weight": (256, width)})
    for block in range(blocks):
        name = f"1.layers.{block}"
        yield norm(f"{name}.norm1", width)
        projections = {"in_proj_weight": (3 * width, width), "in_proj_bias": (3 * width,)}
        yield LayerDefinition(
            f"{name}.self_attn",
            {**projections, "out_proj.weight": (width, width), "out_proj.bias": (width,)},
            8 * width * width * tokens + 4 * tokens * tokens * width,
        )
        yield norm(f"{name}.norm2", width)
        yield linear(f"{name}.linear1", width, 4 * width, tokens)
        yield linear(f"{name}.linear2", 4 * width, width, tokens)
    yield linear("2", width, 256, tokens)


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
