"""Keys of a study file and of its pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..results.rows import Row
from ..results.statistics import NEVER
from .columns import check_derivations, matching, without_suffix
from .rows import READERS, USE, USED_BY

SHORTENED = ("base", "grid")
KINDS = ("line", "bar", "points")


@dataclass(frozen=True)
class Figure:
    """A picture of the rows.

    `x`, `y`: columns; several `y` are drawn on top of each other in bars. Columns of lists are curves. `series`: columns
    that tell lines or groups of bars apart, or name points. `where`: only rows with these values, or one of a list of them.
    `log`: axes that are logarithmic. `bounds`: {label: column} of reference curves, the same for all series. `smooth`:
    curves as moving averages. `title`: in place of the study's title and labels; it must name the emulated parts.
    """

    name: str
    kind: str
    x: str
    y: list[str]
    series: list[str] = field(default_factory=list)
    where: Mapping[str, Any] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    labels: Mapping[str, str] = field(default_factory=dict)
    bounds: Mapping[str, str] = field(default_factory=dict)
    caption: str = ""
    title: str = ""
    smooth: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"figure {self.name}: kind is one of {', '.join(KINDS)}, got {self.kind!r}")
        if unknown := set(self.log) - {"x", "y"}:
            raise ValueError(f"figure {self.name}: log has x and y, got {', '.join(sorted(unknown))}")
        if self.bounds and self.kind != "line":
            raise ValueError(f"figure {self.name}: bounds are curves of a line, and its kind is {self.kind}")
        if len(self.y) > 1 and self.kind != "bar":
            raise ValueError(
                f"figure {self.name}: several y lie on top of each other in bars, and its kind is {self.kind}"
            )

    @property
    def columns(self) -> list[str]:
        """The columns that it draws."""
        return [*self.series, self.x, *self.y]

    @property
    def named(self) -> list[str]:
        """All columns that it speaks of."""
        return [*self.columns, *self.where, *self.bounds.values()]

    def shown(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows that it is about and that have the columns to draw."""
        about = matching(rows, self.where)
        return [row for row in about if all(row.get(name) not in (None, NEVER) for name in (self.x, *self.y))]


def figures_of(described: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """From a study file, where `y` and `series` may be one name. Raises ValueError for unknown and missing keys."""
    figures = []
    for entry in described:
        named = {key: [entry[key]] for key in ("y", "series") if isinstance(entry.get(key), str)}
        try:
            figures.append(Figure(**{**entry, **named}))
        except TypeError as error:
            names = ", ".join(each.name for each in fields(Figure))
            raise ValueError(f"a figure: {error}; it has {names}") from error
    return figures


@dataclass(frozen=True)
class SweepConfig:
    """Run a command on every point of a grid, once each, and draw what came out."""

    title: str = ""
    """title of the study"""
    source: str = ""
    """paper and figure that the study follows"""
    command: str = ""
    """command that runs at each point: bench, collective, compare or ready"""
    base: dict[str, Any] = field(default_factory=dict)
    """options of the command that all points share"""
    grid: list[dict[str, Any]] = field(default_factory=list)
    """options of the command, of which a list has a value for each point; the points are all combinations. Several
    grids come one after the other"""
    only: dict[str, Any] = field(default_factory=dict)
    """part of the grid to run and show: {option: [values]}"""
    mean_over: list[str] = field(default_factory=list)
    """columns, such as seed, to average over; NAME.spread shows the standard deviation, NAME.interval half the width of
    the mean's 95 % interval"""
    shortened: dict[str, Any] = field(default_factory=dict)
    """replacements by --short: {base: {...}}, key by key, and {grid: {...}}, as a whole"""
    derive: dict[str, Any] = field(default_factory=dict)
    """columns computed from others: {speedup: {of: COLUMN, against: {compressor: none}}}"""
    columns: list[str] = field(default_factory=list)
    """columns of the table; if not given, those of the grid and the figures"""
    where: dict[str, Any] = field(default_factory=dict)
    """rows of the table, as in a figure; derived columns may use the others"""
    figures: list[dict[str, Any]] = field(default_factory=list)
    """pictures to draw: name, kind (line, bar, points), x, y, series and more"""
    notes: str = ""
    """text that a reader of the results must know"""
    limit: float = 600.0
    """longest time that one point may take, in seconds"""
    out: str | None = None
    """folder for points, table and pictures; runs/TITLE if not given"""
    short: bool = False
    """run the smallest form of the study: it takes seconds, and its figures mean nothing"""
    redraw: bool = False
    """draw the points that are there, and run nothing"""

    def __post_init__(self) -> None:
        if self.command not in READERS:
            raise ValueError(
                f"command is one of {', '.join(READERS)}, got {self.command!r}: name a study, --config FILE"
            )
        if unknown := set(self.shortened) - set(SHORTENED):
            raise ValueError(f"shortened has {', '.join(SHORTENED)}, got {', '.join(sorted(unknown))}")
        options = {key: value for grid in self.grids for key, value in grid.items()}
        if empty := [key for key, value in options.items() if value == []]:
            raise ValueError(f"grid.{empty[0]} has no value: name at least one")
        if self.command != USED_BY and {**self.chosen_base, **options}.get(USE):
            raise ValueError(f"{USE} is for points of {USED_BY}, whose steps are timed; leave it out of {self.command}")
        if not self.limit > 0:
            raise ValueError(f"limit is above 0 seconds, got {self.limit}")
        if unknown := self.only.keys() - options:
            raise ValueError(f"only names options of the grid, {', '.join(options)}; got {', '.join(sorted(unknown))}")
        check_derivations(self.derive)
        figures_of(self.figures)

    @property
    def chosen_base(self) -> Mapping[str, Any]:
        """The options of all points, of the short form if it is asked for."""
        return {**self.base, **(self.shortened.get("base", {}) if self.short else {})}

    @property
    def grids(self) -> list[dict[str, Any]]:
        """The grids, of the short form if it is asked for; a single point without any."""
        found = self.shortened.get("grid", self.grid) if self.short else self.grid
        return (found if isinstance(found, list) else [found]) or [{}]

    @property
    def varied(self) -> list[str]:
        """The options that a grid has a list of values for."""
        return list(dict.fromkeys(key for grid in self.grids for key, value in grid.items() if isinstance(value, list)))

    @property
    def drawn(self) -> list[Figure]:
        """The pictures."""
        return figures_of(self.figures)

    @property
    def shown(self) -> list[str]:
        """The columns of the table."""
        drawn = [column for figure in self.drawn for column in figure.columns]
        return self.columns or list(dict.fromkeys([*self.varied, *drawn, *self.derive]))

    @property
    def named(self) -> list[str]:
        """All columns that the study takes of rows."""
        derived = [
            name
            for entry in self.derive.values()
            for name in (*(entry[key] for key in ("of", "over", "seconds") if key in entry), *entry.get("against", ()))
        ]
        drawn = [name for figure in self.drawn for name in figure.named]
        named = dict.fromkeys((*derived, *self.columns, *self.where, *drawn))
        return [name for name in named if without_suffix(name) not in {*self.derive, *self.varied}]
