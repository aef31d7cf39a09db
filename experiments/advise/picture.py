"""Predicted steps by the number of hosts, drawn, with what is assumed."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from ...hooks.advice import Advice
from ...hooks.advice.recommendation import ASSUMED, Forecast
from ..results.palette import DPI, look
from ..results.words import in_words

ALIKE = 0.02  # of a line's seconds


def draw(advice: Advice, title: str, path: Path) -> Path:
    """Draw a line for each compressor in its better order, and rings around recommendations; return the file."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    forecasts = sorted((advice.here, *advice.elsewhere), key=_hosts)
    counts = [_hosts(each) for each in forecasts]
    for number, (steps, specs) in enumerate(_lines(forecasts, [choice.spec for choice in advice.here.choices])):
        color, marker, style = look(number)
        names = "\n".join(map(in_words, specs))
        axes.plot(counts, steps, color=color, marker=marker, linestyle=style, markersize=5, label=names)
    chosen = [each.best.step for each in forecasts]
    axes.plot(counts, chosen, "o", markersize=13, markerfacecolor="none", color="black", label="recommended")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.minorticks_off()
    axes.set_xlabel(f"hosts; measured on {_hosts(advice.here)}, all others predicted")
    axes.set_ylabel("predicted seconds per step")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right center", fontsize=8)
    axes.set_title(textwrap.fill(title, 80), fontsize=10)
    figure.text(0.01, -0.01, f"assumed: {ASSUMED}", fontsize=8, va="top")
    figure.savefig(path, dpi=DPI, bbox_inches="tight")
    return path


def _lines(forecasts: Sequence[Forecast], specs: Sequence[str]) -> list[tuple[list[float], list[str]]]:
    """Seconds by forecast, and the compressors that take these: one line for several that nobody could distinguish."""
    lines: list[tuple[list[float], list[str]]] = []
    for spec in dict.fromkeys(specs):
        steps = [_seconds(each, spec) for each in forecasts]
        for others, alike in lines:
            if all(math.isclose(*pair, rel_tol=ALIKE) for pair in zip(others, steps, strict=True)):
                alike.append(spec)
                break
        else:
            lines.append((steps, [spec]))
    return lines


def _hosts(forecast: Forecast) -> int:
    return forecast.ranks // forecast.per_host


def _seconds(forecast: Forecast, spec: str) -> float:
    return min((choice.step for choice in forecast.choices if choice.spec == spec), default=float("nan"))
