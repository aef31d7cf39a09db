"""The points of a grid, each a command line of its own."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ... import __version__
from .config import SweepConfig

# All options of a command with these arguments, defaults included; ValueError where the command refuses them.
OptionsOf: TypeAlias = Callable[[str, Sequence[str]], Mapping[str, Any]]


@dataclass(frozen=True)
class Point:
    """One run.

    `chosen`: its values of the grid; `given`: the options that differ from the command's defaults; `options`: all of them.
    """

    command: str
    chosen: Mapping[str, Any]
    given: Mapping[str, Any]
    options: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The values of the grid in words."""
        return _label(self.command, self.chosen)

    @property
    def arguments(self) -> list[str]:
        """What follows `gradwire` on the command line."""
        return [self.command, *_flags(self.given)]

    def key(self) -> str:
        """What identifies the run: the command, all its options, and gradwire's version."""
        identity = [self.command, self.options, __version__]
        return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:16]


def points_of(config: SweepConfig, options_of: OptionsOf) -> list[Point]:
    """The product of the grid, the last key varying fastest. Raises ValueError for a point that its command refuses."""
    names = list(config.chosen_grid)
    products = itertools.product(*config.chosen_grid.values())
    return [_point(config, dict(zip(names, values, strict=True)), options_of) for values in products]


def _point(config: SweepConfig, chosen: Mapping[str, Any], options_of: OptionsOf) -> Point:
    given = {**config.chosen_base, **chosen}
    try:
        options = options_of(config.command, _flags(given))
    except ValueError as error:
        raise ValueError(f"the point {_label(config.command, chosen)}: {error}") from error
    return Point(config.command, chosen, given, options)


def _label(command: str, chosen: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_text(value)}" for key, value in chosen.items()) or command


def _flags(given: Mapping[str, Any]) -> list[str]:
    return [f"--{_flag(key)}={_text(value)}" for key, value in _flat(given)]


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
