"""The comparison in pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .comparison import Results, RunResult
from .palette import DPI, look
from .statistics import smoothed
from .words import in_words

LARGEST_BUBBLE = 2500.0  # points squared
SMALLEST_BUBBLE = 30.0
MARKS = 8  # on a line
PANEL = (3.8, 3.7)  # inches
LEGEND_COLUMNS = 4


def draw(results: Results, out: Path) -> list[Path]:
    """Write `loss.png` and `tradeoff.png`; where they are."""
    pictures = {"loss.png": _losses(results), "tradeoff.png": _tradeoff(results)}
    for name, figure in pictures.items():
        figure.savefig(out / name, dpi=DPI)
    return [out / name for name in pictures]


def _figure(results: Results, panels: int) -> tuple[Figure, list[Axes]]:
    """A figure of panels beside each other that share what is up."""
    figure = Figure(figsize=(PANEL[0] * max(panels, 1.5), PANEL[1]), layout="constrained")
    figure.suptitle(f"{results.model['name']} on {results.data['name']}, {results.ranks}", fontsize=11)
    return figure, list(figure.subplots(1, panels, squeeze=False, sharey=True)[0])


def _losses(results: Results) -> Figure:
    """Loss by step, then by seconds on each network."""
    networks = results.by_network()
    figure, (by_step, *by_time) = _figure(results, 1 + len(networks))
    _curves(by_step, networks[0].runs, [range(1, run.steps + 1) for run in networks[0].runs])
    _label(by_step, "step", "training loss, nats (smoothed)")
    for axes, each in zip(by_time, networks, strict=True):
        _curves(axes, each.runs, [run.train_seconds for run in each.runs])
        _label(axes, f"seconds of training{_on(each, networks)}", "")
    _legend(figure, by_step)
    return figure


def _curves(axes: Axes, runs: Sequence[RunResult], places: Sequence[Sequence[float]]) -> None:
    """The smoothed loss of each run, and in pale the loss itself."""
    for index, (run, across) in enumerate(zip(runs, places, strict=True)):
        color, marker, style = look(index)
        every = max(1, run.steps // MARKS)
        marks: dict[str, Any] = {"marker": marker, "markersize": 5, "markevery": (index % every, every)}
        axes.plot(across, run.loss, color=color, alpha=0.12, linewidth=0.8)
        axes.plot(
            across, smoothed(run.loss), style, color=color, label=in_words(run.compressor), linewidth=1.5, **marks
        )


def _tradeoff(results: Results) -> Figure:
    """Accuracy against speed on each network; areas are bytes."""
    networks = results.by_network()
    figure, panels = _figure(results, len(networks))
    for axes, each in zip(panels, networks, strict=True):
        _bubbles(axes, each.runs)
        _label(axes, f"steps per second (median){_on(each, networks)}", "")
    panels[0].set_ylabel("validation accuracy, %")
    panels[0].set_title("area: bytes that a rank sends per step", fontsize=9, loc="left")
    _legend(figure, panels[0])
    return figure


def _bubbles(axes: Axes, runs: Sequence[RunResult]) -> None:
    largest = max(run.sent_bytes_per_step for run in runs) or 1.0
    for index, run in enumerate(runs):
        place, look_of = (1 / run.step_seconds["p50"], 100 * run.eval.accuracy), look(index)
        area = max(SMALLEST_BUBBLE, LARGEST_BUBBLE * run.sent_bytes_per_step / largest)
        label = f"{in_words(run.compressor)} ({run.compression_ratio:.0f}x)"
        axes.scatter(*place, s=area, color=look_of.color, alpha=0.35, linewidth=0)
        axes.scatter(*place, s=SMALLEST_BUBBLE, color=look_of.color, marker=look_of.marker, label=label)
    axes.margins(0.2)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=LEGEND_COLUMNS, fontsize=9)


def _on(results: Results, networks: Sequence[Results]) -> str:
    """Return the name of the network if there are several."""
    return f", {results.environment['network']}" if len(networks) > 1 else ""


def _label(axes: Axes, across: str, up: str) -> None:
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(alpha=0.25)
