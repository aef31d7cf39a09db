"""What a picture of a study shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..results.rows import Row

KINDS = ("line", "bar", "points")


@dataclass(frozen=True)
class Figure:
    """A picture of the rows.

    `x`, `y`: columns; several `y` are drawn on top of each other in bars. Columns of lists are curves. `series`: columns
    that tell lines or groups of bars apart, or name points. `where`: only rows with these values, or one of a list of them.
    `log`: axes that are logarithmic. `bounds`: {label: column} of reference curves, the same for all series. `smooth`:
    curves as moving averages.
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
        """Of the rows, those that it is about and that have what it draws."""
        wanted = {name: value if isinstance(value, list) else [value] for name, value in self.where.items()}
        about = [row for row in rows if all(row.get(name) in values for name, values in wanted.items())]
        return [row for row in about if all(row.get(name) is not None for name in (self.x, *self.y))]


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
