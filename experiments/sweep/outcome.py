"""Results of a study: rows, pictures and text, for a terminal, a reader and other programs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ... import __version__
from ..bench.rows import FACTORS
from ..results.rows import Row, shown
from ..results.statistics import per_cent
from .columns import INTERVAL, derived, matching, means
from .config import SweepConfig
from .points import Finished, Point
from .rows import column_of

STUDY = "study.json"
PAGE = "README.md"
IDENTITY = ("model", "world_size", *FACTORS)  # besides the grid: what a row is compared at
PROCESSOR = "processor"
DAY = len("2026-01-31")  # of a point's date


@dataclass(frozen=True)
class Outcome:
    """The rows of all points that ran, and why others did not. `command`: the line that runs it again.

    `pictures`: file names and what they show.
    """

    config: SweepConfig
    command: str
    points: Sequence[Point]
    finished: Sequence[Finished]
    failures: Mapping[str, str] = field(default_factory=dict)
    pictures: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def rows(self) -> list[Row]:
        """With the derived columns."""
        rows = [row for point in self.finished for row in point.rows]
        dimensions = [*IDENTITY, *(column_of(key, rows[0]) for key in self.config.varied)] if rows else []
        found = derived(rows, self.config.derive, dimensions)
        drawn = [column for figure in self.config.drawn for column in figure.columns]
        return means(found, self.config.mean_over, dimensions, drawn) if self.config.mean_over else found

    @cached_property
    def listed(self) -> list[Row]:
        """The rows of the table."""
        return matching(self.rows, self.config.where)

    @cached_property
    def columns(self) -> list[str]:
        """The columns of the table: those asked for that any of its rows has and that are no lists."""
        rows = self.listed
        wanted = dict.fromkeys(column_of(name, rows[0]) for name in self.config.shown) if rows else {}
        return [name for name in wanted if any(_plain(row.get(name)) for row in rows)]

    @property
    def labels(self) -> list[str]:
        """The emulated parts of any row."""
        return labels_of(self.rows)

    @property
    def provenance(self) -> dict[str, Any]:
        """Versions and dates of the points that ran, and the environment of the last."""
        dates = sorted(point.date for point in self.finished) or [""]
        ordered = sorted(self.finished, key=lambda point: point.date)
        return {
            "gradwire": ", ".join(dict.fromkeys(point.gradwire or __version__ for point in self.finished)),
            "torch": ", ".join(dict.fromkeys(point.torch or torch.__version__ for point in self.finished)),
            "date": dates[-1] if dates[0][:DAY] == dates[-1][:DAY] else f"{dates[0]} to {dates[-1]}",
            "environment": {**ordered[-1].environment, **_processors(ordered)} if ordered else {},
        }

    def heading(self, rows: Sequence[Row], title: str = "") -> str:
        """Return the text above a picture of these rows: its title, or that of the study with what was emulated or set."""
        words = [title] if title else [self.config.title, "; ".join(labels_of(rows))]
        return "\n".join(filter(None, [*words, _warning(self.config.short)]))

    def write(self, folder: Path) -> None:
        """Write `study.json` and `README.md`."""
        document = json.dumps(self.document(), indent=1, default=str)
        (folder / STUDY).write_text(document + "\n", encoding="utf-8")
        (folder / PAGE).write_text("\n".join(self.page()) + "\n", encoding="utf-8")

    def document(self) -> dict[str, Any]:
        """All of it for other programs."""
        config = self.config
        return {
            "kind": "sweep",
            **self.provenance,
            "title": config.title,
            "source": config.source,
            "notes": config.notes,
            "short": config.short,
            "labels": self.labels,
            "command": self.command,
            "commands": self.commands(),
            "config": asdict(config),
            "columns": self.columns,
            "rows": self.rows,
            "pictures": dict(self.pictures),
            "failures": dict(self.failures),
        }

    def commands(self) -> list[str]:
        """The command line of every point."""
        return [shlex.join(["gradwire", *point.arguments]) for point in self.points]

    def page(self) -> list[str]:
        """The study in Markdown."""
        columns, config = self.columns, self.config
        lines = [f"# {config.title}", "", *filter(None, [config.source, _warning(config.short)]), ""]
        lines += [config.notes, ""] * bool(config.notes)
        lines += [f"Labels: {'; '.join(self.labels)}.", ""] * bool(self.labels)
        if columns:
            lines += [_line(columns), _line(["---"] * len(columns))]
            lines += [_line([self._cell(row, name) for name in columns]) for row in self.listed]
        for name, caption in self.pictures.items():
            lines += ["", f"![{caption or name}]({name})", "", caption]
        lines += ["", *[f"- failed: {label}: {why.splitlines()[0]}" for label, why in self.failures.items()]]
        lines += ["", "The study:", "", "```console", f"$ {self.command}", "```"]
        lines += ["", "The points:", "", "```console", *[f"$ {each}" for each in self.commands()], "```", ""]
        told = self.provenance
        known = {key: value for key, value in told["environment"].items() if _plain(value) and key not in told}
        machine = ", ".join(f"{key} {value}" for key, value in known.items())
        return [*lines, f"{told['date']}, gradwire {told['gradwire']}, torch {told['torch']}; {machine}."]

    def table(self) -> Table:
        """The rows for a terminal."""
        table, rows = Table(title=self.config.title, title_justify="left"), self.listed
        for name in self.columns:
            words = any(isinstance(row.get(name), str) for row in rows)
            heading = name.replace(".", "\n").replace("_", " ")
            table.add_column(heading, justify="left" if words else "right", no_wrap=words)
        for row in rows:
            table.add_row(*[self._cell(row, name) for name in self.columns])
        return table

    def _cell(self, row: Row, name: str) -> str:
        """Return a value as text; a difference in per cent with its interval."""
        value = row.get(name)
        if value and self.config.derive.get(name, {}).get("percent"):
            return per_cent(value, row.get(name + INTERVAL))
        return shown(value)


def labels_of(rows: Sequence[Row]) -> list[str]:
    """Return the emulated parts of any row."""
    return list(dict.fromkeys(label for row in rows for label in row.get("labels") or ()))


def _processors(points: Sequence[Finished]) -> dict[str, str]:
    """Return all processors that points ran on, as one entry of an environment."""
    found = dict.fromkeys(str(point.environment[PROCESSOR]) for point in points if PROCESSOR in point.environment)
    return {PROCESSOR: ", ".join(found)} if found else {}


def _warning(short: bool) -> str:
    return "In short form: this shows that the study runs; its figures mean nothing." if short else ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(value: Any) -> bool:
    return value is not None and not isinstance(value, list | dict)
