"""A study from begin to end: run what is missing, then draw and show all of it."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.progress import TextColumn, TimeRemainingColumn

from ..ranks.child import CommandFailure
from ..ranks.stopping import INTERRUPTED, sigterm_interrupts
from ..results.files import command_line, prepared_folder
from ..results.progress_bar import progress_bar
from ..results.rows import Row
from .config import SweepConfig
from .outcome import PAGE, ROWS, Outcome
from .points import POINTS, Finished, Key, Point, append_point, points_of, read_points
from .rows import check_columns
from .run import run_point

WHOLE_SWEEP = 7 * 24 * 3600.0  # seconds that the speed for the time left is averaged over


def sweep_command(config: SweepConfig) -> int:
    """Run the study and show it; the exit code: 1 where a point failed.

    All points are checked before one runs, and the columns that the study names once there are rows of one.
    """
    if config.drawn:
        import_module("matplotlib")  # which is optional: without it, before anything runs
    points = points_of(config)
    keys = [point.key for point in points]
    out = prepared_folder(config.out or f"runs/{_file_name(config)}")
    cached = read_points(out)
    rows = [row for key in keys if key in cached for row in cached[key].rows]
    if rows:
        check_columns(config.named, config.command, rows)
    missing = {} if config.redraw else {k: p for k, p in zip(keys, points, strict=True) if k not in cached}
    Console().print(_start(config, points, missing, out), markup=False, highlight=False)
    failures, interrupted = _run(missing, config, out, rows)
    outcome = Outcome(config, command_line().replace(" --redraw", ""), _finished(out, keys), failures)
    if config.redraw and not outcome.finished:
        raise ValueError(f"there is nothing to draw in {out}: run the study without --redraw first")
    _keep(outcome, out)
    return INTERRUPTED if interrupted else int(bool(failures))


def outcome_of(config: SweepConfig, out: Path, command: str) -> Outcome:
    """Return what a folder has of a study. `command` is the line that runs the study."""
    return Outcome(config, command, _finished(out, [point.key for point in points_of(config)]))


def _finished(out: Path, keys: Sequence[Key]) -> list[Finished]:
    cached = read_points(out)
    return [cached[key] for key in keys if key in cached]


def _file_name(config: SweepConfig) -> str:
    name = re.sub(r"\W+", "-", config.title.lower()).strip("-") or config.command
    return f"{name}-short" if config.short else name


def _start(config: SweepConfig, points: Sequence[Point], missing: Mapping[Key, Point], out: Path) -> str:
    shown = f"{config.title}: {len(points)} points of gradwire {config.command}"
    if config.redraw:
        return shown
    if not missing:
        return f"{shown}, already finished: delete {out / POINTS} to start over"
    return f"{shown}, {len(points) - len(missing)} of them already in {out}"


def _run(
    missing: Mapping[Key, Point], config: SweepConfig, out: Path, rows: Sequence[Row]
) -> tuple[dict[str, str], bool]:
    """Run points one after the other; why some failed, and whether it was interrupted. `rows`: of those that are there.

    Raises ValueError where the points lack a column that the study names.
    """
    failures: dict[str, str] = {}
    try:
        left = (TextColumn("left"), TimeRemainingColumn())
        with sigterm_interrupts(), progress_bar(Console(stderr=True), *left, speed_estimate_period=WHOLE_SWEEP) as bar:
            task = bar.add_task("", total=len(missing))
            for point in missing.values():
                bar.update(task, description=point.label)
                try:
                    finished = run_point(point, config.limit)
                except CommandFailure as error:
                    failures[point.label] = str(error)
                else:
                    append_point(out, finished)
                    rows = [*rows, *finished.rows]
                    check_columns(config.named, config.command, rows)
                bar.advance(task)
    except KeyboardInterrupt:
        print("\nstopped; finished points are kept, the same command continues", file=sys.stderr)
        return failures, True
    return failures, False


def _keep(outcome: Outcome, out: Path) -> None:
    """Write, draw and show; what is written is there even if a picture fails."""
    console = Console(width=max(Console().width, 120))
    if outcome.finished:
        outcome = written(outcome, out)
        console.print(outcome.table())
    for label in outcome.labels:
        console.print(f"NOT REAL: {label}", markup=False, highlight=False, soft_wrap=True)
    for label, why in outcome.failures.items():
        console.print(f"failed: {label}: {why}", style="red", markup=False, highlight=False, soft_wrap=True)
    places = {"points": [POINTS], "table": [PAGE, ROWS], "pictures": list(outcome.pictures)}
    for name, files in places.items():
        there = ", ".join(str(out / file) for file in files if (out / file).exists())
        console.print(f"{name:<11}{there}", highlight=False, markup=False, soft_wrap=True)


def written(outcome: Outcome, out: Path) -> Outcome:
    """Write page and table, draw the figures that there are rows for, and name these on the page."""
    outcome.write(out)
    if not outcome.config.drawn:
        return outcome
    from .picture import draw  # here, since matplotlib is optional

    shown = [(figure, figure.shown(outcome.rows)) for figure in outcome.config.drawn]
    pictures = {
        draw(figure, rows, outcome.heading(rows, figure.title), out).name: figure.caption
        for figure, rows in shown
        if rows
    }
    outcome = dataclasses.replace(outcome, pictures=pictures)
    outcome.write(out)
    return outcome
