"""The points of a grid, each a command line of its own, and those that have finished: what is there is not run again."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ... import __version__
from ..cli.commands import COMMANDS
from ..cli.parsing import configuration
from .config import SweepConfig

logger = logging.getLogger(__name__)
POINTS = "points.jsonl"
EARLIER = re.compile(r"(?<!\w)feedback=(?=\d)")  # the name of error_feedback= in points that ran before November 28, 2026


@dataclass(frozen=True)
class Point:
    """One run.

    `chosen`: its values of the grid; `given`: the options that differ from the command's defaults.
    """

    command: str
    chosen: Mapping[str, Any]
    given: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The values of the grid in words."""
        return _label(self.command, self.chosen)

    @property
    def arguments(self) -> list[str]:
        """The words behind `gradwire` on the command line."""
        return [self.command, *_flags(self.given)]

    def key(self) -> str:
        """Return the identity of the run: its command line, in any order of options, and gradwire's version.

        A command that gets a new option keeps the points that ran without it.
        """
        identity = [sorted(self.arguments), __version__]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def points_of(config: SweepConfig) -> list[Point]:
    """A point for every place of the grids, the last option varying fastest.

    Raises ValueError where there is none, and for one that its command refuses.
    """
    points = []
    for grid in config.grids:
        lists = {key: values for key, values in grid.items() if isinstance(values, list)}
        for values in itertools.product(*lists.values()):
            chosen = dict(zip(lists, values, strict=True))
            if not _lies_in({**grid, **chosen}, config.only):
                continue
            given = {**config.chosen_base, **grid, **chosen}
            try:
                configuration(COMMANDS[config.command], config.command, _flags(given))
            except ValueError as error:
                raise ValueError(f"the point {_label(config.command, chosen)}: {error}") from error
            points.append(Point(config.command, chosen, given))
    if not points:
        raise ValueError(f"no place of the grid has the values of only, {config.only}")
    return points


def _lies_in(place: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """Return True if a place of the grid has one of a part's values for each of the part's options."""
    return all(set(_texts(place.get(name))) & set(_texts(values)) for name, values in part.items())


def _texts(value: Any) -> list[str]:
    return list(map(str, value if isinstance(value, list) else [value]))


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


@dataclass(frozen=True)
class Finished:
    """A point that ran. `rows`: what it measured; `seconds`: that the whole command took; `date`: when it ended."""

    key: str
    arguments: list[str]
    chosen: Mapping[str, Any]
    rows: list[dict[str, Any]]
    seconds: float
    date: str
    gradwire: str
    environment: Mapping[str, Any]
    torch: str = ""


def read_points(folder: Path) -> dict[str, Finished]:
    """All points of a folder by their keys, the last line of each winning; one cut short is left out with a warning."""
    path = folder / POINTS
    found: dict[str, Finished] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(filter(None, lines), start=1):
        try:
            point = Finished(**json.loads(EARLIER.sub("error_feedback=", line)))
        except (json.JSONDecodeError, TypeError) as error:
            logger.warning("%s line %d is left out, its point will run again: %s", path, number, error)
            continue
        found[point.key] = point
    return found


def append_point(folder: Path, point: Finished) -> None:
    """Add a line in a single write, on the disk before this returns."""
    line = json.dumps(asdict(point), default=str) + "\n"
    with (folder / POINTS).open("a+b", buffering=0) as file:
        if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
            line = "\n" + line  # after a line that a crash cut short
        file.write(line.encode())
        os.fsync(file.fileno())
