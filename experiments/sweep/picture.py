"""The rows of a study as pictures."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from PIL import Image

from ..network.link import shown_rate
from ..results.palette import DPI, look
from ..results.rows import Row
from ..results.statistics import smoothed
from ..results.words import in_words
from .columns import INTERVAL
from .config import Figure

SIZE = (8.0, 4.8)  # inches
TITLE_CHARACTERS = 95  # in a line
GROUP_WIDTH = 0.8  # of the distance between two groups of bars
MARKED = 16  # points of a line that get marks, at most
COMPRESSOR = "compressor"  # the column that pictures show in words
BOUND_STYLES = ("--", ":", "-.")
LEGEND_CHARACTERS = 110  # that fit beside each other below a picture
HANDLE_CHARACTERS = 7  # that a line's sample takes


def draw(figure: Figure, rows: Sequence[Row], title: str, out: Path) -> Path:
    """Write `NAME.png` of these rows, one at least; where it is."""
    canvas = Canvas(figsize=SIZE, layout="constrained")
    axes = canvas.subplots()
    DRAWERS[figure.kind](axes, figure, rows)
    axes.set(**{f"{axis}scale": "log" for axis in figure.log})
    if not ("y" in figure.log or figure.smooth or figure.kind == "points"):
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.set_xlabel(figure.labels.get("x", figure.x))
    axes.set_ylabel(figure.labels.get("y", ", ".join(figure.y)))
    axes.set_title("\n".join(fill(line, TITLE_CHARACTERS) for line in _with_units(title).splitlines()), fontsize=10)
    axes.grid(alpha=0.25)
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        columns = max(1, LEGEND_CHARACTERS // (HANDLE_CHARACTERS + max(map(len, labels))))
        canvas.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8)
    return saved(canvas, out / f"{figure.name}.png")


def saved(canvas: Canvas, file: Path) -> Path:
    """Write a picture with 256 colours, which takes a quarter of the bytes; where it is."""
    pixels = io.BytesIO()
    canvas.savefig(pixels, dpi=DPI)
    Image.open(pixels).convert("RGB").quantize(method=Image.Quantize.FASTOCTREE).save(file, optimize=True)
    return file


def series_of(figure: Figure, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each line or group of bars, by its name."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(_name(figure, row), []).append(row)
    return found


def _name(figure: Figure, row: Row) -> str:
    return ", ".join(_shown(column, row.get(column)) for column in figure.series)


def _shown(column: str, value: Any) -> str:
    """A value as people write it: a compressor in words, a number with its column's name."""
    name = column.rpartition(".")[2].replace("_", " ")
    if isinstance(value, bool):
        return f"with {name}" if value else f"without {name}"
    text = value if isinstance(value, str) else f"{name} {value}"
    return in_words(text) if column == COMPRESSOR else _with_units(text)


def _with_units(text: str) -> str:
    """Bandwidths and labs as people write them."""
    text = re.sub(r"\bnetlab: ", "emulated network: ", text)
    return re.sub(r"\b[\d.]+[kmg]bit\b", lambda rate: shown_rate(rate[0]), text)


def _lines(axes: Axes, figure: Figure, rows: Sequence[Row]) -> None:
    for index, (name, members) in enumerate(series_of(figure, rows).items()):
        color, marker, style = look(index)
        for across, up in _curves(figure, figure.y[0], members):
            marks: dict[str, Any] = {"marker": marker, "markersize": 4, "markevery": -(-len(across) // MARKED)}
            axes.plot(across, up, style, color=color, label=name, **marks)
    for style, (label, column) in zip(BOUND_STYLES, figure.bounds.items(), strict=False):
        known = {row[figure.x]: row for row in rows if row.get(column) is not None}
        for across, up in _curves(figure, column, list(known.values())) if known else ():
            axes.plot(across, up, style, color="black", linewidth=1, label=label)


def _curves(figure: Figure, column: str, rows: Sequence[Row]) -> list[tuple[list[Any], list[float]]]:
    """A curve for every row where the columns are lists, else one through all rows; null of JSON is NaN."""
    if isinstance(rows[0][column], list):
        heights = [[math.nan if value is None else value for value in row[column]] for row in rows]
        curves = [smoothed(each) for each in heights] if figure.smooth else heights
        return [(row[figure.x], curve) for row, curve in zip(rows, curves, strict=True)]
    numeric = all(isinstance(row[figure.x], int | float) for row in rows)
    ordered = sorted(rows, key=lambda row: row[figure.x]) if numeric else rows
    across = [row[figure.x] if numeric else _shown(figure.x, str(row[figure.x])) for row in ordered]
    return [(across, [row[column] for row in ordered])]


def _bars(axes: Axes, figure: Figure, rows: Sequence[Row]) -> None:
    """Groups of bars; several columns lie on top of each other."""
    groups, series = list(dict.fromkeys(str(row[figure.x]) for row in rows)), series_of(figure, rows)
    ticks = [{"True": "yes", "False": "no"}.get(group) or _shown(figure.x, group) for group in groups]
    width, stacked = GROUP_WIDTH / len(series), len(figure.y) > 1
    for index, (name, members) in enumerate(series.items()):
        places = [groups.index(str(row[figure.x])) + (index - (len(series) - 1) / 2) * width for row in members]
        bottoms = [0.0] * len(members)
        for layer, column in enumerate(figure.y):
            heights = [row[column] for row in members]
            label = (column.rpartition(".")[2] if not index else None) if stacked else name
            color = look(layer if stacked else index).color
            bars = axes.bar(places, heights, 0.92 * width, bottom=bottoms, label=label, color=color)
            bottoms = [below + height for below, height in zip(bottoms, heights, strict=True)]
        texts = [f"{name}\n{height:.3g}" if stacked else f"{height:.3g}" for height in bottoms]
        axes.bar_label(bars, texts, fontsize=7)
    axes.set_xticks(range(len(groups)), ticks, fontsize=8, rotation=20 if max(map(len, ticks)) > 12 else 0)
    axes.margins(y=0.15)


def _points(axes: Axes, figure: Figure, rows: Sequence[Row]) -> None:
    """A point for every row, with its 95 % interval; a line and names for those that no other is left of and below."""
    [column] = figure.y
    errors = [row.get(column + INTERVAL) or 0.0 for row in rows]
    across, up = ([row[name] for row in rows] for name in (figure.x, column))
    axes.errorbar(across, up, yerr=errors, fmt="o", color=look(0).color, markersize=4, linewidth=0.8)
    best: list[tuple[float, float]] = []
    for place, row in sorted(zip(zip(across, up, strict=True), rows, strict=True), key=lambda each: each[0]):
        if not best or place[1] < best[-1][1]:
            best.append(place)
            axes.annotate(_name(figure, row), place, (4, 4), textcoords="offset points", fontsize=7)
    axes.plot(*zip(*best, strict=True), "--", color="grey", linewidth=0.8, zorder=0)


DRAWERS = {"line": _lines, "bar": _bars, "points": _points}
