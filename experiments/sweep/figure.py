"""What a picture of a study shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Any

from ..results.rows import Row

KINDS = ("line", "bar", "box", "points")


@dataclass(frozen=True)
class Figure:
    """A picture of the rows.

    `x`, `y`: columns; several `y` are drawn on top of each other in bars, as lines of their own otherwise. Columns of
    lists are curves, or the samples of a box. `series`: columns that tell lines or groups of bars apart, or name points.
    `where`: only rows with these values, or one of a list of them. `log`: axes that are logarithmic. `lines`: {label:
    height} of reference lines. `bounds`: {label: column} of reference curves, the same for all series. `spread`: two
    columns that bound a band around a line. `smooth`: curves as moving averages.
    """

    name: str
    kind: str
    x: str
    y: list[str]
    series: list[str] = field(default_factory=list)
    where: Mapping[str, Any] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    labels: Mapping[str, str] = field(default_factory=dict)
    lines: Mapping[str, float] = field(default_factory=dict)
    bounds: Mapping[str, str] = field(default_factory=dict)
    spread: list[str] = field(default_factory=list)
    caption: str = ""
    smooth: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"figure {self.name}: kind is one of {', '.join(KINDS)}, got {self.kind!r}")
        if unknown := set(self.log) - {"x", "y"}:
            raise ValueError(f"figure {self.name}: log has x and y, got {', '.join(sorted(unknown))}")
        if self.bounds and self.kind != "line":
            raise ValueError(f"figure {self.name}: bounds are curves of a line, and its kind is {self.kind}")
        if len(self.spread) not in (0, 2):
            raise ValueError(f"figure {self.name}: spread is a lower and an upper column, got {self.spread}")

    @property
    def columns(self) -> list[str]:
        """The columns that it draws."""
        return [*self.series, self.x, *self.y]

    @property
    def named(self) -> list[str]:
        """All columns that it speaks of."""
        return [*self.columns, *self.spread, *self.where, *self.bounds.values()]

    def shown(self, rows: Sequence[Row]) -> list[Row]:
        """Of the rows, those that it is about and that have what it draws."""
        about = [row for row in rows if all(_is(row.get(name), value) for name, value in self.where.items())]
        return [row for row in about if all(row.get(name) is not None for name in (self.x, *self.y))]


def _is(value: Any, wanted: Any) -> bool:
    return value in wanted if isinstance(wanted, list) else bool(value == wanted)


def check_drawing(figures: Sequence[Figure]) -> None:
    """Raise ModuleNotFoundError where there are figures, and matplotlib, which draws them, is not installed."""
    if figures:
        import_module("matplotlib")


def figures_of(described: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """From a study file, where `y` and `series` may be one name. Raises ValueError for unknown and missing keys."""
    return [_figure(entry) for entry in described]


def _figure(entry: Mapping[str, Any]) -> Figure:
    listed = {
        key: [entry[key]] if isinstance(entry[key], str) else entry[key] for key in ("y", "series") if key in entry
    }
    try:
        return Figure(**{**entry, **listed})
    except TypeError as error:
        names = ", ".join(each.name for each in fields(Figure))
        raise ValueError(f"a figure: {error}; it has {names}") from error
