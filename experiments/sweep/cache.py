"""Finished points, a line each: what is there is not run again."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
POINTS = "points.jsonl"


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
            point = Finished(**json.loads(line))
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
