"""One point as a process of its own."""

from __future__ import annotations

import json
import shlex
import tempfile
import time
from pathlib import Path
from typing import Any

from ..network.lab.utilization import Utilization
from ..ranks.child import CommandFailure, run_to_end
from ..ranks.own_command import own_command
from .points import Finished, Point
from .rows import USE, link_use, rows_of

REPORTS = {"compare": ("out", "results.json")}  # the option that says where, and the file
REPORT = ("json", "result.json")


def run_point(point: Point, limit: float) -> Finished:
    """Run `gradwire COMMAND ...` and read what it measured.

    Raises CommandFailure. Whatever happens, what the point started is ended, by the kernel where this process is killed.
    """
    option, name = REPORTS.get(point.command, REPORT)
    with tempfile.TemporaryDirectory(prefix="gradwire-sweep-") as folder:
        place = folder if name == "results.json" else f"{folder}/{name}"
        use = Path(folder) / "use.json"
        watched = [f"--{USE}={use}"] if point.given.get(USE) else []
        arguments = [*point.arguments, *watched, f"--{option}={place}"]
        began = time.monotonic()
        command = own_command(*arguments)
        run_to_end(shlex.join(["gradwire", *arguments]), command, limit, Path(folder) / "written")
        document = _document(Path(folder) / name)
        return Finished(
            arguments=point.arguments,
            chosen=point.chosen,
            rows=_rows(point, document, use if watched else None),
            seconds=round(time.monotonic() - began, 1),
            date=time.strftime("%Y-%m-%d %H:%M:%S %z"),
            gradwire=document["gradwire"],
            torch=document["torch"],
            environment=document["environment"],
        )


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise CommandFailure(f"it left no result: {error}") from error
    assert isinstance(document, dict)
    return document


def _rows(point: Point, document: dict[str, Any], use: Path | None) -> list[dict[str, Any]]:
    try:
        rows = rows_of(point.command, document, point.chosen)
        return rows if use is None else link_use(rows, Utilization.read(use))
    except (KeyError, ValueError, OSError) as error:
        raise CommandFailure(f"its result cannot be read: {error!r}") from error
