"""One point as a process of its own."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..network.lab.utilization import Utilization
from ..ranks.own_command import own_command
from ..ranks.stopping import killed_with
from .points import Finished, Point
from .rows import USE, link_use, rows_of

GRACE_SECONDS = 10.0  # to end its ranks and to take down what it has set up
LAST_LINES = 12  # of what a failed point wrote
REPORTS = {"compare": ("out", "results.json")}  # the option that says where, and the file
REPORT = ("json", "result.json")


class PointFailure(RuntimeError):
    """A point ended with an error, took too long or left no result; the message has what it wrote last."""


def run_point(point: Point, limit: float) -> Finished:
    """Run `gradwire COMMAND ...` and read what it measured.

    Raises PointFailure. Whatever happens, what the point started is ended, by the kernel where this process is killed.
    """
    option, name = REPORTS.get(point.command, REPORT)
    with tempfile.TemporaryDirectory(prefix="gradwire-sweep-") as folder:
        place = folder if name == "results.json" else f"{folder}/{name}"
        use = Path(folder) / "use.json"
        watched = [f"--{USE}={use}"] if point.given.get(USE) else []
        arguments = [*point.arguments, *watched, f"--{option}={place}"]
        began = time.monotonic()
        _run_to_end(shlex.join(["gradwire", *arguments]), own_command(*arguments), limit, Path(folder))
        document = _document(Path(folder) / name)
        return Finished(
            key=point.key(),
            arguments=point.arguments,
            chosen=point.chosen,
            rows=_rows(point, document, use if watched else None),
            seconds=round(time.monotonic() - began, 1),
            date=time.strftime("%Y-%m-%d %H:%M:%S %z"),
            gradwire=document["gradwire"],
            torch=document["torch"],
            environment=document["environment"],
        )


def _run_to_end(shown: str, command: Sequence[str], limit: float, folder: Path) -> None:
    """Run a command, which errors name by what is `shown`."""
    written = folder / "written"
    with written.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, preexec_fn=killed_with(os.getpid())
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    if code != 0:
        why = f"took longer than {limit:g} s" if code is None else f"ended with exit code {code}"
        last = written.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
        raise PointFailure("\n".join([f"{why}: {shown}", *last]))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt what still runs, so that it can end its own; then, or at once when interrupted again, kill its session."""
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
    finally:
        with suppress(ProcessLookupError):  # nothing is left, as it should be
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # an interrupt amid a wait makes Popen wait for ever
            process.wait(GRACE_SECONDS)


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise PointFailure(f"it left no result: {error}") from error
    assert isinstance(document, dict)
    return document


def _rows(point: Point, document: dict[str, Any], use: Path | None) -> list[dict[str, Any]]:
    try:
        rows = rows_of(point.command, document, point.chosen)
        return rows if use is None else link_use(rows, Utilization.read(use))
    except (KeyError, ValueError, OSError) as error:
        raise PointFailure(f"its result cannot be read: {error!r}") from error
