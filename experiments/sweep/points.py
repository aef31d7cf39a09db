"""The points of a grid, each a command line of its own."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from ..cli.commands import COMMANDS
from ..cli.parsing import configuration
from .config import SweepConfig


@dataclass(frozen=True)
class Point:
    """One run. `chosen`: its values of the grid; `given`: the options that differ from the command's defaults."""

    command: str
    chosen: Mapping[str, Any]
    given: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The values of the grid in words."""
        return ", ".join(f"{key} {_text(value)}" for key, value in self.chosen.items()) or self.command

    @property
    def arguments(self) -> list[str]:
        """What follows `gradwire` on the command line."""
        return [self.command, *(f"--{_flag(key)}={_text(value)}" for key, value in _flat(self.given))]

    def configured(self) -> dict[str, Any]:
        """All options of the run, defaults included. Raises ValueError where the command would refuse them."""
        try:
            options = configuration(COMMANDS[self.command], self.command, self.arguments[1:])
        except ValueError as error:
            raise ValueError(f"the point {self.label}: {error}") from error
        return dataclasses.asdict(options)

    def key(self) -> str:
        """What identifies the run: the command, all its options, and gradwire's version."""
        identity = [self.command, self.configured(), version("gradwire")]
        return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:16]


def points_of(config: SweepConfig) -> list[Point]:
    """The product of the grid, the last key varying fastest."""
    names = list(config.chosen_grid)
    products = itertools.product(*config.chosen_grid.values())
    chosen = [dict(zip(names, values, strict=True)) for values in products]
    return [Point(config.command, each, {**config.chosen_base, **each}) for each in chosen]


def _flat(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _flag(key: str) -> str:
    return key.replace("_", "-")


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value)
