"""The points of a grid, each a command line of its own."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
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
    """A point for every place of the grids, the last option varying fastest.

    Raises ValueError where there is none, and for one that its command refuses.
    """
    points = []
    for grid in config.grids:
        lists = {key: values for key, values in grid.items() if isinstance(values, list)}
        for values in itertools.product(*lists.values()):
            chosen = dict(zip(lists, values, strict=True))
            if lies_in({**grid, **chosen}, config.only):
                points.append(_point(config, chosen, {**config.chosen_base, **grid, **chosen}, options_of))
    if not points:
        raise ValueError(f"no place of the grid has the values of only, {config.only}")
    return points


def lies_in(place: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """Whether a place of the grid has one of a part's values of each of the part's options.

    >>> lies_in({"seed": 1, "compressors": ["none", "int8"]}, {"seed": [0, 1], "compressors": "int8"})
    True
    """
    return all(not set(_texts(place.get(name))).isdisjoint(_texts(values)) for name, values in part.items())


def _texts(value: Any) -> list[str]:
    return list(map(str, value if isinstance(value, list) else [value]))


def _point(config: SweepConfig, chosen: Mapping[str, Any], given: Mapping[str, Any], options_of: OptionsOf) -> Point:
    try:
        options = options_of(config.command, _flags(given))
    except ValueError as error:
        raise ValueError(f"the point {_label(config.command, chosen)}: {error}") from error
    return Point(config.command, chosen, given, options)


def _label(command: str, chosen: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_text(value)}" for key, value in chosen.items()) or command


def _flags(given: Mapping[str, Any], prefix: str = "") -> list[str]:
    flags: list[str] = []
    for key, value in given.items():
        name = prefix + key.replace("_", "-")
        flags += _flags(value, f"{name}.") if isinstance(value, Mapping) else [f"--{name}={_text(value)}"]
    return flags


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value)
