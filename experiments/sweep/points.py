"""The points of a grid, each a command line of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ... import __version__
from .config import CASE, SweepConfig

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
    """A point for every place of the grid. Raises ValueError where there is none, and for one that its command refuses."""
    if not config.places:
        raise ValueError(f"no place of the grid has the values of only, {config.only}")
    return [_point(config, chosen, options_of) for chosen in config.places]


def _point(config: SweepConfig, chosen: Mapping[str, Any], options_of: OptionsOf) -> Point:
    of_case = config.chosen_cases.get(chosen.get(CASE, ""), {})
    given = {**config.chosen_base, **of_case, **{key: value for key, value in chosen.items() if key != CASE}}
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
