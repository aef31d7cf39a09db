"""Where and when the points of a study ran, and the command that runs it again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from ... import __version__
from .cache import Finished
from .config import SweepConfig

STUDIES = Path(__file__).parents[1] / "configs" / "studies"  # those that are shipped
DAY = len("2026-01-31")  # of a point's date


def provenance(points: Sequence[Finished]) -> dict[str, Any]:
    """Versions, date and environment of the points that ran."""
    torches = [point.torch or str(point.environment.get("torch") or "") for point in points]
    gradwires = [point.gradwire or str(point.environment.get("gradwire") or "") for point in points]
    return {
        "gradwire": _joined(gradwires) or __version__,
        "torch": _joined(torches) or torch.__version__,
        "date": _period([point.date for point in points]),
        "environment": _machine(sorted(points, key=lambda point: point.date)),
    }


def _joined(values: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(filter(None, values)))


def _period(dates: Sequence[str]) -> str:
    """When the last point ended; from the first to the last where they ran on several days.

    >>> _period(["2026-01-02 10:00:00 +0000", "2026-01-01 10:00:00 +0000"])
    '2026-01-01 10:00:00 +0000 to 2026-01-02 10:00:00 +0000'
    """
    first, last = min(dates, default=""), max(dates, default="")
    return last if first[:DAY] == last[:DAY] else f"{first} to {last}"


def _machine(points: Sequence[Finished]) -> dict[str, Any]:
    """The environment of the last point, with all values of what differs between points."""
    last: Mapping[str, Any] = points[-1].environment if points else {}
    found = {name: [point.environment[name] for point in points if name in point.environment] for name in last}
    return {name: _differing(values) for name, values in found.items()}


def _differing(values: Sequence[Any]) -> Any:
    """The last of equal values and of those that are no scalars; else all of them, each once.

    >>> _differing([2, 2]), _differing([2, 4, 2]), _differing([["lo"], ["lo", "wire"]])
    (2, '2 / 4', ['lo', 'wire'])
    """
    if any(isinstance(value, list | dict) for value in values):
        return values[-1]
    texts = dict.fromkeys(map(str, values))
    return " / ".join(texts) if len(texts) > 1 else values[-1]


def command_of(config: SweepConfig, folder: Path) -> str:
    """The command line that runs the study again in a folder."""
    short, file = ["--short"] * config.short, config.name or _shipped(config) or "FILE"
    lab = [f"--{name}={value}" for name, value in config.lab.items()]
    return shlex.join(["gradwire", "sweep", "--config", file, *short, *lab, "--out", str(folder)])


def _shipped(config: SweepConfig) -> str | None:
    """The name of the shipped study that says the same."""
    for file in sorted(STUDIES.glob("*.yaml")):
        said = yaml.safe_load(file.read_text(encoding="utf-8"))
        if all(getattr(config, key) == value for key, value in said.items()):
            return file.stem
    return None
