"""A trace: what each layer of a model has of parameters, and how long its forward and backward take."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """A part of a model that runs as one.

    `parameters` are `{name: shape}`, of those whose gradients its backward completes. A parameter's name in the model is
    `NAME.PARAMETER`, or the parameter's alone where the layer's name is empty.
    """

    name: str
    parameters: dict[str, Shape]
    forward_seconds: float
    backward_seconds: float

    def __post_init__(self) -> None:
        for what, seconds in (("forward_seconds", self.forward_seconds), ("backward_seconds", self.backward_seconds)):
            if not _is_number(seconds) or not 0 <= seconds < math.inf:
                raise ValueError(f"{what} of layer {self.name!r} is a number of seconds, at least 0; got {seconds!r}")
        for parameter, shape in self.parameters.items():
            if not all(isinstance(side, int) and side >= 1 for side in shape):
                raise ValueError(f"the shape of {self.full(parameter)!r} is whole numbers above 0, got {list(shape)}")

    def full(self, parameter: str) -> str:
        """The name in the model of one of the layer's parameters."""
        return f"{self.name}.{parameter}" if self.name else parameter


@dataclass(frozen=True)
class Trace:
    """A model's layers in the order of forward, with their seconds on an accelerator.

    Attributes:
        name: the trace's name.
        source: the origin of the times, in words.
        batch_size: samples per step for which the times hold.
        layers: the layers.

    Raises:
        ValueError: no model can have this trace.
    """

    name: str
    source: str
    batch_size: int
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise ValueError(f"batch_size of trace {self.name!r} is at least 1, got {self.batch_size!r}")
        if twice := _twice([layer.name for layer in self.layers]):
            raise ValueError(f"trace {self.name!r} has several layers called {twice!r}")
        names = list(self.parameters)
        if not names:
            raise ValueError(f"trace {self.name!r} has no parameters, so there is nothing to average")
        if twice := _twice([layer.full(each) for layer in self.layers for each in layer.parameters]):
            raise ValueError(f"trace {self.name!r} has several parameters called {twice!r}")
        if within := sorted(set(names) & {prefix for name in names for prefix in _prefixes(name)}):
            raise ValueError(f"trace {self.name!r}: {within[0]!r} is a parameter and a module with parameters")

    @property
    def parameters(self) -> dict[str, Shape]:
        """The shape of each parameter, {name in the model: shape}, in the order of forward."""
        return {layer.full(name): shape for layer in self.layers for name, shape in layer.parameters.items()}

    @property
    def elements(self) -> int:
        """The number of elements of all parameters."""
        return sum(map(prod, self.parameters.values()))

    @property
    def forward_seconds(self) -> float:
        """Seconds of forward, all layers together."""
        return sum(layer.forward_seconds for layer in self.layers)

    @property
    def backward_seconds(self) -> float:
        """Seconds of backward, all layers together."""
        return sum(layer.backward_seconds for layer in self.layers)

    @property
    def seconds(self) -> float:
        """Seconds of computation per step: forward and backward, without the optimizer."""
        return self.forward_seconds + self.backward_seconds

    def scaled(self, total_seconds: float) -> Trace:
        """Return the trace of another accelerator: all times in proportion.

        Args:
            total_seconds: seconds of computation per step.

        Returns:
            The scaled trace.

        Raises:
            ValueError: the seconds are not above 0, or the trace takes no time.
        """
        if not _is_number(total_seconds) or not 0 < total_seconds < math.inf:
            raise ValueError(f"the computation of a step takes a number of seconds above 0, got {total_seconds!r}")
        if self.seconds == 0:
            raise ValueError(f"trace {self.name!r} takes no time, so it cannot be scaled to {total_seconds} s")
        factor = total_seconds / self.seconds
        layers = tuple(
            dataclasses.replace(
                layer,
                forward_seconds=layer.forward_seconds * factor,
                backward_seconds=layer.backward_seconds * factor,
            )
            for layer in self.layers
        )
        return dataclasses.replace(
            self, layers=layers, source=f"{self.source}; scaled to {total_seconds:g} s per step by the user"
        )

    def write(self, path: Path) -> None:
        """Write the trace as JSON, one line per layer.

        Args:
            path: the file.
        """
        layers = ",\n  ".join(json.dumps(dataclasses.asdict(layer)) for layer in self.layers)
        head = json.dumps({"name": self.name, "source": self.source, "batch_size": self.batch_size}, indent=1)
        path.write_text(head.removesuffix("\n}") + f',\n "layers": [\n  {layers}\n ]\n}}\n', encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Read what `write` wrote. Raises ValueError for a file that is not a trace, saying what is wrong with it."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"cannot read the trace {path}: {error}") from error
        try:
            layers = [Layer(**{**each, "parameters": _shapes(each["parameters"])}) for each in document["layers"]]
            return cls(**{**document, "layers": tuple(layers)})
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ValueError(f"{path} is no trace: {error!r}") from error


def _shapes(lists: dict[str, list[int]]) -> dict[str, Shape]:
    return {name: tuple(shape) for name, shape in lists.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _twice(names: list[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _prefixes(name: str) -> list[str]:
    """The modules in which a parameter lies."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]
