"""What a study leaves behind: rows, pictures, words; for a terminal, a reader and other programs."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from ..bench.rows import FACTORS
from ..results.rows import Row, shown
from .cache import Finished
from .config import CASE, SweepConfig
from .derive import derived
from .mean import means
from .points import Point
from .provenance import command_of, provenance
from .recommendation import recommendations
from .rows import column_of, named

STUDY = "study.json"
PAGE = "README.md"
DESCRIBED = (
    "command",
    "base",
    "cases",
    "grid",
    "skip",
    "only",
    "mean_over",
    "shortened",
    "derive",
    "figures",
    "verdict",
)
IDENTITY = ("model", "world_size", *FACTORS)  # besides the grid: what a row is compared at


@dataclass(frozen=True)
class Outcome:
    """The rows of all points that ran, and why others did not. `pictures`: file names and what they show."""

    config: SweepConfig
    points: Sequence[Point]
    finished: Sequence[Finished]
    failures: Mapping[str, str] = field(default_factory=dict)
    pictures: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        """With the derived columns."""
        rows = [row for point in self.finished for row in point.rows]
        dimensions = [*IDENTITY, *self._grid(rows)]
        found = derived(rows, self.config.derive, dimensions)
        drawn = [column for figure in self.config.drawn for column in figure.columns]
        return means(found, self.config.mean_over, dimensions, drawn) if self.config.mean_over else found

    def _grid(self, rows: Sequence[Row]) -> list[str]:
        names = [CASE] * bool(self.config.chosen_cases) + list(self.config.chosen_grid)
        return [column_of(key, rows[0]) for key in names] if rows else []

    @property
    def named_rows(self) -> list[tuple[str, Row]]:
        """The rows by what tells them apart: the place on the grid, and a number where several share it."""
        rows, taken = self.rows, Counter[str]()
        columns, found = dict.fromkeys([*self._grid(rows), *IDENTITY]), []
        for row in rows:
            name = " ".join(named(key, row[key]) for key in columns if _plain(row.get(key))) or "row"
            taken[name] += 1
            found.append((f"{name} #{taken[name]}" if taken[name] > 1 else name, row))
        return found

    @property
    def columns(self) -> list[str]:
        """Of the table: those asked for that any row has and that are no lists."""
        rows = self.rows
        wanted = dict.fromkeys(column_of(name, rows[0]) for name in self.config.shown) if rows else {}
        return [name for name in wanted if any(_plain(row.get(name)) for row in rows)]

    @property
    def recommendations(self) -> list[str]:
        """A sentence for each setting, where the study asks for them."""
        criterion = self.config.criterion
        return list(recommendations(criterion, self.rows)) if criterion and self.finished else []

    @property
    def labels(self) -> list[str]:
        """What was emulated, of any row."""
        return labels_of(self.rows)

    def heading(self, rows: Sequence[Row]) -> str:
        """Above a picture of these rows: the title, and what was emulated or set."""
        return "\n".join(filter(None, [self.config.title, "; ".join(labels_of(rows)), _warning(self.config.short)]))

    def write(self, folder: Path) -> None:
        """Write `study.json` and `README.md`."""
        document = json.dumps(self.document(folder), indent=1, default=str)
        (folder / STUDY).write_text(document + "\n", encoding="utf-8")
        (folder / PAGE).write_text("\n".join(self.page(folder)) + "\n", encoding="utf-8")

    def document(self, folder: Path) -> dict[str, Any]:
        """All of it for other programs, to be written in a folder."""
        config = self.config
        return {
            "kind": "sweep",
            **provenance(self.finished),
            "title": config.title,
            "source": config.source,
            "notes": config.notes,
            "short": config.short,
            "labels": self.labels,
            "command": command_of(config, folder),
            "commands": self.commands(),
            "config": {name: getattr(config, name) for name in DESCRIBED},
            "columns": self.columns,
            "rows": self.rows,
            "verdicts": self.recommendations,
            "pictures": dict(self.pictures),
            "failures": dict(self.failures),
        }

    def commands(self) -> list[str]:
        """The command line of every point."""
        return [shlex.join(["gradwire", *point.arguments]) for point in self.points]

    def page(self, folder: Path) -> list[str]:
        """The study in Markdown, to be written in a folder."""
        columns, config = self.columns, self.config
        lines = [f"# {config.title}", "", *filter(None, [config.source, _warning(config.short)]), ""]
        lines += [config.notes, ""] * bool(config.notes)
        lines += [f"Labels: {'; '.join(self.labels)}.", ""] * bool(self.labels)
        lines += [f"- {sentence}" for sentence in self.recommendations] + [""] * bool(self.recommendations)
        if columns:
            lines += [_line(columns), _line(["---"] * len(columns))]
            lines += [_line([shown(row.get(name)) for name in columns]) for row in self.rows]
        for name, caption in self.pictures.items():
            lines += ["", f"![{caption or name}]({name})", "", caption]
        lines += ["", *[f"- failed: {label}: {why.splitlines()[0]}" for label, why in self.failures.items()]]
        lines += ["", "The study:", "", "```console", f"$ {command_of(config, folder)}", "```"]
        lines += ["", "The points:", "", "```console", *[f"$ {each}" for each in self.commands()], "```", ""]
        return [*lines, *self._machine()]

    def _machine(self) -> list[str]:
        told = provenance(self.finished)
        known = {key: value for key, value in told["environment"].items() if _plain(value) and key not in told}
        machine = ", ".join(f"{key} {value}" for key, value in known.items())
        return [f"{told['date']}, gradwire {told['gradwire']}, torch {told['torch']}; {machine}."]

    def table(self) -> Table:
        """The rows for a terminal."""
        table = Table(title=self.config.title, title_justify="left")
        rows = self.rows
        for name in self.columns:
            words = any(isinstance(row.get(name), str) for row in rows)
            heading = name.replace(".", "\n").replace("_", " ")
            table.add_column(heading, justify="left" if words else "right", no_wrap=words)
        for row in rows:
            table.add_row(*[shown(row.get(name)) for name in self.columns])
        return table


def labels_of(rows: Sequence[Row]) -> list[str]:
    """What was emulated or set, of any row."""
    return list(dict.fromkeys(label for row in rows for label in row.get("labels") or ()))


def _warning(short: bool) -> str:
    return "In short form: this shows that the study runs; its figures mean nothing." if short else ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(value: Any) -> bool:
    return value is not None and not isinstance(value, list | dict)
