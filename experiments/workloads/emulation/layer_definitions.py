"""Layers of a model's definition: parameters and floating-point operations."""

from __future__ import annotations

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
