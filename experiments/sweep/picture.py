"""The rows of a study as pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogFormatter

from ..network.link import BITS_PER_BYTE, parse_rate
from ..results.naming import name_points
from ..results.palette import STYLES, look
from ..results.picture import DPI
from ..results.rows import Row
from ..results.statistics import smoothed
from .figure import Figure
from .mean import spread_of
from .rows import named

SIZE = (8.0, 4.8)  # inches
HEADROOM = 1.05  # above what is drawn from zero
TITLE_CHARACTERS = 95  # in a line
GROUP_WIDTH = 0.8  # of the distance between two groups of bars
MARKED = 16  # points of a line that get marks, at most
BOUND_STYLES = ("--", ":", "-.")
LEGEND_CHARACTERS = 110  # that fit beside each other below a picture
HANDLE_CHARACTERS = 7  # that a line's sample takes
GBIT = 1e9


class SmallTicks(LogFormatter):
    """Plain numbers at as many of the small ticks of a logarithmic axis as there is room for."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """The text at one tick."""
        return f"{x:g}" if super().__call__(x, pos) else ""


def draw(figure: Figure, rows: Sequence[Row], title: str, out: Path) -> Path:
    """Write `NAME.png` of these rows, one at least; where it is."""
    if figure.kind == "line":
        figure, rows = _by_rate(figure, rows)
    canvas = Canvas(figsize=SIZE, layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.subplots()
    DRAWERS[figure.kind](axes, figure, rows)
    _set_axes(axes, figure, title)
    _legend(canvas, axes)
    if figure.kind == "points":
        name_points(
            canvas, axes, [(row[figure.x], row[figure.y[0]]) for row in rows], [_name(figure, row) for row in rows]
        )
    canvas.savefig(out / f"{figure.name}.png", dpi=DPI)
    return out / f"{figure.name}.png"


def _set_axes(axes: Axes, figure: Figure, title: str) -> None:
    for label, height in figure.lines.items():
        axes.axhline(height, color="black", linewidth=1, linestyle="--", label=label)
    for axis in figure.log:
        axes.set(**{f"{axis}scale": "symlog" if figure.kind == "points" and _reaches_zero(axes, axis) else "log"})
    if "y" in figure.log:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(SmallTicks())
    elif not figure.smooth and figure.kind != "points" and axes.get_ylim()[0] > 0:
        axes.set_ylim(0, HEADROOM * axes.get_ylim()[1])
    axes.set_xlabel(figure.labels.get("x", figure.x))
    axes.set_ylabel(figure.labels.get("y", ", ".join(figure.y)))
    axes.set_title("\n".join(fill(line, TITLE_CHARACTERS) for line in title.splitlines()), fontsize=10)
    axes.grid(alpha=0.25)


def _reaches_zero(axes: Axes, axis: str) -> bool:
    """Whether anything that is drawn is at or below zero."""
    return bool(getattr(axes.dataLim, f"{axis}0") <= 0)


def _legend(canvas: Canvas, axes: Axes) -> None:
    """Below the axes, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        columns = max(1, LEGEND_CHARACTERS // (HANDLE_CHARACTERS + max(map(len, labels))))
        canvas.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8)


def _by_rate(figure: Figure, rows: Sequence[Row]) -> tuple[Figure, Sequence[Row]]:
    """Rates of links as numbers, Gbit/s, if there are no other values across."""
    rates = [_gbit(row[figure.x]) for row in rows]
    if None in rates:
        return figure, rows
    labels = {**figure.labels, "x": f"{figure.labels.get('x', figure.x)}, Gbit/s"}
    return replace(figure, labels=labels), [{**row, figure.x: rate} for row, rate in zip(rows, rates, strict=True)]


def _gbit(value: Any) -> float | None:
    """A rate in Gbit/s; None for what is none, for text without a unit and for 0, which is no limit.

    >>> _gbit("100mbit"), _gbit("0"), _gbit("none"), _gbit(4)
    (0.1, None, None, None)
    """
    if not isinstance(value, str) or not value[-1:].isalpha():
        return None
    try:
        return parse_rate(value) * BITS_PER_BYTE / GBIT or None
    except ValueError:
        return None


def series_of(figure: Figure, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each line or group of bars, by its name."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(_name(figure, row), []).append(row)
    return found


def _name(figure: Figure, row: Row) -> str:
    return ", ".join(named(column, row.get(column)) for column in figure.series)


def _lines(axes: Axes, figure: Figure, rows: Sequence[Row]) -> None:
    for index, (name, members) in enumerate(series_of(figure, rows).items()):
        for style, column in zip(STYLES, figure.y, strict=False):
            label = name if len(figure.y) == 1 else f"{name} {column}".strip()
            if len(figure.y) == 1:
                style = look(index).style
            for across, up in _curves(figure, column, members):
                marks: dict[str, Any] = {
                    "marker": look(index).marker,
                    "markersize": 4,
                    "markevery": -(-len(across) // MARKED),
                }
                axes.plot(across, up, style, color=look(index).color, label=label, **marks)
        if figure.spread:
            _band(axes, figure, members, index)
    for style, (label, column) in zip(BOUND_STYLES, figure.bounds.items(), strict=False):
        known = {row[figure.x]: row for row in rows if row.get(column) is not None}
        for across, up in _curves(figure, column, list(known.values())) if known else ():
            axes.plot(across, up, style, color="black", linewidth=1, label=label)


def _curves(figure: Figure, column: str, rows: Sequence[Row]) -> list[tuple[list[Any], list[float]]]:
    """A curve for every row where the columns are lists, else one through all rows."""
    if isinstance(rows[0][column], list):
        heights = [list(map(_height, row[column])) for row in rows]
        curves = [smoothed(each) for each in heights] if figure.smooth else heights
        return [(row[figure.x], curve) for row, curve in zip(rows, curves, strict=True)]
    ordered = sorted(rows, key=lambda row: row[figure.x]) if _numeric(figure, rows) else rows
    return [([_place(row[figure.x]) for row in ordered], [_height(row[column]) for row in ordered])]


def _numeric(figure: Figure, rows: Sequence[Row]) -> bool:
    return all(isinstance(row[figure.x], int | float) for row in rows)


def _place(value: Any) -> Any:
    return value if isinstance(value, int | float) else str(value)


def _height(value: float | None) -> float:
    """NaN for the null that stands for it in JSON."""
    return math.nan if value is None else value


def _band(axes: Axes, figure: Figure, rows: Sequence[Row], index: int) -> None:
    bounded = [row for row in rows if None not in map(row.get, figure.spread)]
    if not bounded:
        return
    lower, upper = (_curves(figure, column, bounded) for column in figure.spread)
    for (across, below), (_, above) in zip(lower, upper, strict=True):
        axes.fill_between(across, below, above, color=look(index).color, alpha=0.15, linewidth=0)


def _bars(axes: Axes, figure: Figure, rows: Sequence[Row]) -> None:
    """Groups of bars; several columns lie on top of each other."""
    groups, series = list(dict.fromkeys(str(row[figure.x]) for row in rows)), series_of(figure, rows)
    width = GROUP_WIDTH / len(series)
    for index, (name, members) in enumerate(series.items()):
        places = [groups.index(str(row[figure.x])) + (index - (len(series) - 1) / 2) * width for row in members]
        bottoms = [0.0] * len(members)
        for layer, column in enumerate(figure.y):
            heights = [row[column] for row in members]
            label = name if len(figure.y) == 1 else column if not index else None
            color = look(index if len(figure.y) == 1 else layer).color
            bars = axes.bar(places, heights, 0.92 * width, bottom=bottoms, label=label, color=color)
            bottoms = [below + height for below, height in zip(bottoms, heights, strict=True)]
        names = [f"{height:.3g}" for height in bottoms]
        axes.bar_label(bars, [f"{name}\n{text}" for text in names] if len(figure.y) > 1 and name else names, fontsize=7)
    axes.set_xticks(range(len(groups)), groups, fontsize=8, rotation=20 if max(map(len, groups)) > 12 else 0)
    axes.margins(y=0.15)


def _boxes(axes: Axes, figure: Figure, rows: Sequence[Row]) -> None:
    """A box of the samples in each row's list: quartiles, whiskers to the 5th and 95th percentile."""
    groups, series = list(dict.fromkeys(str(row[figure.x]) for row in rows)), series_of(figure, rows)
    width = GROUP_WIDTH / len(series)
    for index, (name, members) in enumerate(series.items()):
        places = [groups.index(str(row[figure.x])) + (index - (len(series) - 1) / 2) * width for row in members]
        samples = [[value for value in map(_height, row[figure.y[0]]) if math.isfinite(value)] for row in members]
        face = {"facecolor": look(index).color, "alpha": 0.6}
        boxes = axes.boxplot(
            samples,
            positions=places,
            widths=0.8 * width,
            whis=(5, 95),
            sym="",
            patch_artist=True,
            boxprops=face,
            medianprops={"color": "black"},
            manage_ticks=False,
        )
        boxes["boxes"][0].set_label(name)
    axes.set_xticks(range(len(groups)), groups, fontsize=8)


def _points(axes: Axes, figure: Figure, rows: Sequence[Row]) -> None:
    """A point for every row, with its spread, and a line along those that no other is left of and below."""
    column = figure.y[0]
    for row in rows:
        error = row.get(spread_of(column)) or 0.0
        axes.errorbar(row[figure.x], row[column], yerr=error, fmt="o", color=look(0).color, markersize=4, linewidth=0.8)
    best: list[tuple[float, float]] = []
    for place in sorted((row[figure.x], row[column]) for row in rows):
        best += [place] if not best or place[1] < best[-1][1] else []
    axes.plot(*zip(*best, strict=True), "--", color="grey", linewidth=0.8, zorder=0)


DRAWERS = {"line": _lines, "bar": _bars, "box": _boxes, "points": _points}
