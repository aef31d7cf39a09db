"""Results of a study: rows, pictures and text, for a terminal, a reader and other programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from .points import POINTS, Finished
from .rows import column_of, stored

PAGE = "README.md"
ROWS = "rows.csv"
LONGEST = 20  # rows of a table on the page
IDENTITY = ("model", "world_size", *FACTORS)  # besides the grid: what a row is compared at
DAY = len("2026-01-31")  # of a point's date


@dataclass(frozen=True)
class Outcome:
    """The rows of all points that ran, and why others did not. `command`: the line that runs it again.

    `pictures`: file names and what they show.
    """

    config: SweepConfig
    command: str
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
        """The columns of the table: an interval stands in the cell of its difference in per cent."""
        inside = {name + INTERVAL for name, how in self.config.derive.items() if how.get("percent")}
        return [name for name in self._filled(self.listed) if name not in inside]

    def _filled(self, rows: Sequence[Row], more: Sequence[str] = ()) -> list[str]:
        """Return the columns that the study shows, behind others, of which any of these rows has a value that is no list."""
        wanted = dict.fromkeys(column_of(name, rows[0]) for name in (*more, *self.config.shown)) if rows else {}
        return [name for name in wanted if any(_plain(row.get(name)) for row in rows)]

    @property
    def labels(self) -> list[str]:
        """The emulated parts of any row."""
        return labels_of(self.rows)

    @property
    def provenance(self) -> dict[str, str]:
        """Versions, days and processors of the points that ran, in order of time."""
        ordered = sorted(self.finished, key=lambda point: point.date)
        days = list(dict.fromkeys(point.date[:DAY] for point in ordered)) or [""]
        return {
            "date": days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}",
            "gradwire": _each(point.gradwire or __version__ for point in ordered),
            "torch": _each(point.torch or torch.__version__ for point in ordered),
            "processor": _each(str(point.environment.get("processor", "")) for point in ordered),
        }

    def heading(self, rows: Sequence[Row], title: str = "") -> str:
        """Return the text above a picture of these rows: its title, or that of the study with what was emulated or set."""
        words = [title] if title else [self.config.title, "; ".join(labels_of(rows))]
        return "\n".join(filter(None, [*words, _warning(self.config.short)]))

    def write(self, folder: Path) -> None:
        """Write `README.md` and `rows.csv`."""
        (folder / PAGE).write_text("\n".join(self.page()) + "\n", encoding="utf-8")
        (folder / ROWS).write_text(self.csv(), encoding="utf-8")

    def csv(self) -> str:
        """Return all rows as CSV, with their places on the grid, and numbers with the digits that points have."""
        text = io.StringIO()
        writer = csv.DictWriter(
            text, self._filled(self.rows, self.config.varied), extrasaction="ignore", lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(map(stored, self.rows))
        return text.getvalue()

    def page(self) -> list[str]:
        """The study in Markdown."""
        config = self.config
        lines = [f"# {config.title}", "", *filter(None, [config.source, _warning(config.short)]), ""]
        lines += [config.notes, ""] * bool(config.notes)
        lines += [f"Labels: {'; '.join(self.labels)}.", ""] * bool(self.labels)
        lines += self._shown_table()
        for name, caption in self.pictures.items():
            lines += ["", f"![{caption or name}]({name})"]
        lines += [""] * bool(self.failures)
        lines += [f"- failed: {label}: {why.splitlines()[0]}" for label, why in self.failures.items()]
        told = self.provenance
        ran = [told["date"], f"gradwire {told['gradwire']}", f"torch {told['torch']}", told["processor"]]
        lines += [
            "",
            f"Data: [{POINTS}]({POINTS}), [{ROWS}]({ROWS}). This runs the study:",
            "",
            "```console",
            f"$ {self.command}",
            "```",
        ]
        return [*lines, "", f"{', '.join(filter(None, ran))}."]

    def _shown_table(self) -> list[str]:
        """The table in Markdown, or a link to a long one."""
        columns = self.columns
        if not columns:
            return []
        if len(self.listed) > LONGEST:
            return [f"The table has {len(self.listed)} rows: [{ROWS}]({ROWS})."]
        cells = [[self._cell(row, name) for name in columns] for row in self.listed]
        return [_line(columns), _line(["---"] * len(columns)), *map(_line, cells)]

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


def _each(values: Iterable[str]) -> str:
    """Return all different values as one text."""
    return ", ".join(filter(None, dict.fromkeys(values)))


def _warning(short: bool) -> str:
    return "In short form: this shows that the study runs; its figures mean nothing." if short else ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(value: Any) -> bool:
    return value is not None and not isinstance(value, list | dict)
