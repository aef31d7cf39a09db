"""The comparison in pictures."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .comparison import Results, RunResult
from .statistics import smoothed

LARGEST_BUBBLE = 2500.0  # points squared
DPI = 130


def draw(results: Results, out: Path) -> list[Path]:
    """Write `loss.png` and `tradeoff.png`; where they are."""
    pictures = {"loss.png": _losses(results), "tradeoff.png": _tradeoff(results)}
    for name, figure in pictures.items():
        FigureCanvasAgg(figure)
        figure.savefig(out / name, dpi=DPI)
    return [out / name for name in pictures]


def _color(index: int) -> tuple[float, float, float, float]:
    return colormaps["tab10"](index % 10)


def _losses(results: Results) -> Figure:
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for index, run in enumerate(results.runs):
        color = _color(index)
        for axes, places in ((by_step, range(1, run.steps + 1)), (by_time, run.train_seconds)):
            axes.plot(places, run.loss, color=color, alpha=0.12, linewidth=0.8)
            axes.plot(places, smoothed(run.loss), color=color, label=run.compressor, linewidth=1.5)
    _label(by_step, "step", "training loss, nats (smoothed)")
    _label(by_time, "seconds of training", "")
    by_step.legend(fontsize=8)
    figure.suptitle(_subject(results), fontsize=11)
    return figure


def _tradeoff(results: Results) -> Figure:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    largest = max(run.sent_bytes_per_step for run in results.runs) or 1.0
    for index, run in enumerate(results.runs):
        area = max(30.0, LARGEST_BUBBLE * run.sent_bytes_per_step / largest)
        place = (1 / run.step_seconds["p50"], 100 * run.eval.accuracy)
        if all(map(math.isfinite, place)):
            axes.scatter(*place, s=area, color=_color(index), alpha=0.5)
            axes.annotate(_note(run), place, fontsize=8, xytext=(6, 6), textcoords="offset points")
    axes.margins(0.2)
    _label(axes, "steps a second (median)", "held-out accuracy, %")
    meaning = "accuracy against speed; area: bytes that a rank sends a step"
    axes.set_title(f"{_subject(results)}\n{meaning}", fontsize=11)
    return figure


def _subject(results: Results) -> str:
    return f"{results.model['name']} on {results.data['name']}, {results.ranks}"


def _note(run: RunResult) -> str:
    return f"{run.compressor} ({run.compression_ratio:.0f}x)"


def _label(axes: Axes, across: str, up: str) -> None:
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(alpha=0.25)
