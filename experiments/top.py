"""`gradwire top`: a live view of a training's ranks, from the folder that `handle.watch(folder=...)` keeps."""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..ddp_core.watching.report_folder import files_in
from .results.rows import milliseconds

logger = logging.getLogger(__name__)
KINDS = {"rank": int, "ranks": int, "host": str, "every": int, "step": int, "compressor": str, "metrics": dict}
LARGEST = 1e300  # of a metric: what is not finite, or no float, is none
STALE = 3.0  # times the seconds that a report takes to come
LEAST = 10.0  # seconds without a report that never count as stale
STRAGGLES = 1.1  # times the median rank's computation
HEADINGS = ("rank", "host", "step", "steps/s", "step time", "compute", "exposed", "wait", "sent", "ratio", "state")
LEAST_TELLING = ("ratio", "steps/s", "wait", "host", "compute", "sent")  # left out in this order where lines are short
FRAME = 3  # characters around a cell


@dataclass(frozen=True)
class TopConfig:
    """Show the ranks of a running training that watches itself: handle.watch(folder=FOLDER) on all of them."""

    folder: str = ""
    """folder that rank 0 writes with handle.watch(folder=...), on this host"""
    once: bool = False
    """print the table once and exit"""
    every: float = 1.0
    """seconds between two refreshes"""

    def __post_init__(self) -> None:
        if not self.folder:
            raise ValueError("folder is empty: name the one of handle.watch(folder=...)")
        if not 0.1 <= self.every <= 3600:
            raise ValueError(f"every is 0.1 to 3600 seconds, got {self.every}")


@dataclass(frozen=True)
class RankNow:
    """The last report of a rank, and its `age`: seconds since rank 0 wrote it."""

    told: dict[str, Any]
    age: float

    def number(self, name: str) -> float | None:
        """A figure, if the rank has it."""
        found = self.told["metrics"].get(name)
        return None if found is None else float(found)

    @property
    def stale(self) -> bool:
        """Return True if a report is long overdue."""
        expected = float(self.told["every"]) * (self.number("step_seconds") or 0.0)
        return self.age > max(LEAST, STALE * expected)


def top(config: TopConfig) -> int:
    """Show the table once, or until Ctrl-C; the exit code."""
    folder, console = Path(config.folder).expanduser(), Console()
    if config.once:
        console.print(table(ranks_in(folder, time.time()), console.width))
        return 0
    try:
        with Live(table(ranks_in(folder, time.time()), console.width), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(config.every)
                with suppress(ValueError):  # a training that begins anew empties the folder
                    live.update(table(ranks_in(folder, time.time()), console.width), refresh=True)
    except KeyboardInterrupt:
        return 0


def ranks_in(folder: Path, now: float) -> list[RankNow]:
    """The ranks that have told something. Raises ValueError where there are none; `now`: in seconds since 1970."""
    try:
        found = [RankNow(told, max(0.0, now - written)) for told, written in reports_in(folder)]
    except OSError as error:
        raise ValueError(f"cannot read {folder}: {error.strerror}") from error
    if not found:
        raise ValueError(
            f"{folder} has no report of a rank: call handle.watch(every=N, folder=...) on all ranks, and look on the host "
            "of rank 0 after N steps"
        )
    return found


def table(ranks: Sequence[RankNow], width: int) -> Table:
    """A row per rank, with those columns that fit into `width` characters, the most telling ones first."""
    first = ranks[0].told
    missing = first["ranks"] - len(ranks)
    title = f"{first['compressor']}, {first['ranks']} ranks" + (f", {missing} of them silent" if missing > 0 else "")
    rows = [[*_figures(rank), state] for rank, state in zip(ranks, states_of(ranks), strict=True)]
    columns = {name: [_printable(row[index]) for row in rows] for index, name in enumerate(HEADINGS)}
    for name in LEAST_TELLING:
        if _wide(columns) > width:
            del columns[name]
    shown = Table(title=Text(_printable(title)), title_justify="left")
    for name in columns:
        words = name in ("host", "state")
        shown.add_column(name, justify="left" if words else "right", no_wrap=True, overflow="ellipsis")
    for index, rank in enumerate(ranks):
        style = "dim" if rank.stale else "yellow" if rows[index][-1] else None
        shown.add_row(*(Text(cells[index]) for cells in columns.values()), style=style)
    return shown


def _wide(columns: Mapping[str, Sequence[str]]) -> int:
    """Characters of a line of the table, its frame included."""
    return 1 + sum(FRAME + max(map(len, (name, *cells))) for name, cells in columns.items())


def _printable(text: str) -> str:
    """A text of a file without what would move the cursor or change colours."""
    return "".join(each if each.isprintable() else "?" for each in text)


def states_of(ranks: Sequence[RankNow]) -> list[str]:
    """In words: stale; slow, which computes longer than the others, who wait for it; behind the newest step."""
    times = {id(rank): rank.number("compute_seconds") for rank in ranks if not rank.stale}
    known = [seconds for seconds in times.values() if seconds is not None]
    usual, newest = statistics.median_low(known) if known else 0.0, max(rank.told["step"] for rank in ranks)
    return [_state(rank, times.get(id(rank)), usual, newest) for rank in ranks]


def _state(rank: RankNow, seconds: float | None, usual: float, newest: int) -> str:
    if rank.stale:
        return f"stale, reported {rank.age:.0f} s ago"
    slow = f"slow, computes {seconds / usual:.2f}x" if usual and seconds and seconds > STRAGGLES * usual else ""
    behind = newest - rank.told["step"]
    late = f"{behind} steps behind" if behind > rank.told["every"] else ""
    return ", ".join(filter(None, (slow, late)))


def _figures(rank: RankNow) -> list[str]:
    told, seconds = rank.told, rank.number("step_seconds")
    times = [rank.number(f"{name}_seconds") for name in ("step", "compute", "exposed", "wait")]
    sent, ratio = rank.number("sent_bytes"), rank.number("ratio")
    return [
        str(told["rank"]),
        str(told["host"]),
        str(told["step"]),
        f"{1 / seconds:.2f}" if seconds else "",
        *("" if each is None else milliseconds(each) for each in times),
        "" if sent is None else decimal(round(sent)),
        "" if ratio is None else f"{ratio:.2f}",
    ]


def reports_in(folder: Path) -> list[tuple[dict[str, Any], float]]:
    """Return (a rank's last report, when rank 0 wrote it, in seconds since 1970), by rank.

    A file that cannot be read, or that is no report, is left out. Raises OSError where the folder cannot be read.
    """
    found = []
    for path in files_in(folder):
        try:
            if not path.is_file():  # a FIFO would wait for a writer
                raise ValueError("it is no regular file")
            found.append((_report(path.read_text(encoding="utf-8")), path.stat().st_mtime))
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("%s is left out: %s", path, error)
    return found


def _report(text: str) -> dict[str, Any]:
    """A report from its file. Raises ValueError for what no rank writes."""
    report = json.loads(text)
    if not isinstance(report, dict):
        raise ValueError(f"it holds {type(report).__name__}, not a rank's report")
    wrong = [name for name, kind in KINDS.items() if type(report.get(name)) is not kind]
    if wrong:
        raise ValueError(f"it is no rank's report: {', '.join(wrong)} missing or of another type")
    metrics = {name: value for name, value in report["metrics"].items() if value is not None}
    odd = [name for name, value in metrics.items() if not isinstance(value, int | float) or not abs(value) < LARGEST]
    if odd or min(report["ranks"], report["every"]) < 1:
        raise ValueError(f"it is no rank's report: {', '.join(odd) or 'ranks or every'} out of range")
    return report
