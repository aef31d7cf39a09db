"""Predicted steps by the number of hosts, drawn, with what is assumed."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ...hooks import Advice
from ...hooks.advice.advice import ASSUMED, Forecast
from ..results.palette import look
from ..results.picture import DPI


def draw(advice: Advice, title: str, path: Path) -> Path:
    """A line for each method in its better order, and rings around what is recommended; where that is."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    forecasts = sorted((advice.here, *advice.elsewhere), key=_hosts)
    counts = [_hosts(each) for each in forecasts]
    for number, spec in enumerate(dict.fromkeys(choice.spec for choice in advice.here.choices)):
        color, marker, style = look(number)
        steps = [_seconds(each, spec) for each in forecasts]
        axes.plot(counts, steps, color=color, marker=marker, linestyle=style, markersize=5, label=spec)
    chosen = [each.best.step for each in forecasts]
    axes.plot(counts, chosen, "o", markersize=13, markerfacecolor="none", color="black", label="recommended")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.minorticks_off()
    axes.set_xlabel(f"hosts; measured on {_hosts(advice.here)}, all others predicted")
    axes.set_ylabel("predicted seconds a step")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right upper", fontsize=8)
    axes.set_title(title, fontsize=10)
    figure.text(0.01, -0.01, f"assumed: {ASSUMED}", fontsize=8, va="top")
    figure.savefig(path, dpi=DPI, bbox_inches="tight")
    return path


def _hosts(forecast: Forecast) -> int:
    return forecast.ranks // forecast.per_host


def _seconds(forecast: Forecast, spec: str) -> float:
    return min((choice.step for choice in forecast.choices if choice.spec == spec), default=float("nan"))
