"""The rows under the roof: speed in floor bytes against the speed of copies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..results.palette import look
from .bench import BASELINE, Row
from .report import GIGA, threaded

NAME = "kernels.png"
DPI = 110
LINE_INCHES, PANEL_INCHES, MARGIN_INCHES = 0.26, 4.2, 1.8
SPREAD = 0.22  # of a line: the distance between two backends
TORCH_COLOR = "gray"


def draw(rows: Sequence[Row], out: Path) -> Path:
    """Write `kernels.png`, a panel for each size and number of threads; where it is. What is wrong is left out."""
    sizes, threads = (sorted({getattr(row, name) for row in rows}) for name in ("elements", "threads"))
    lines, backends = (list(dict.fromkeys(map(name, rows))) for name in (_line, _backend))
    size = (MARGIN_INCHES + PANEL_INCHES * len(sizes), 1 + (0.8 + LINE_INCHES * len(lines)) * len(threads))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(threads), len(sizes), sharey=True, sharex=True, squeeze=False)
    for down, count in enumerate(threads):
        for across, elements in enumerate(sizes):
            shown = [row for row in rows if (row.elements, row.threads) == (elements, count)]
            _panel(panels[down, across], shown, lines, backends)
            panels[down, across].set_title(f"{elements:,} elements, {threaded(count)}", fontsize=10)
    _legend(figure, backends)
    figure.savefig(out / NAME, dpi=DPI)
    return out / NAME


def _line(row: Row) -> str:
    return f"{row.operation}  {row.dtype}"


def _backend(row: Row) -> str:
    return row.backend


def _panel(axes: Axes, rows: Sequence[Row], lines: list[str], backends: list[str]) -> None:
    """Each job's speeds on a line of its own; the roof, which is the speed of copies, upright."""
    for row in rows:
        if row.seconds and row.baseline_seconds:
            line, backend = lines.index(_line(row)), backends.index(row.backend)
            color, marker, _ = look(backend)
            axes.plot(_speed(row, row.seconds), line + SPREAD * backend, marker, color=color, markersize=5)
            axes.plot(_speed(row, row.baseline_seconds), line - SPREAD, "x", color=TORCH_COLOR, markersize=5)
    if roofs := [row.copy_bytes_per_second for row in rows if row.copy_bytes_per_second]:
        axes.axvline(median(roofs) / GIGA, color="black", linewidth=1.2)
    axes.set_yticks(range(len(lines)), lines, fontsize=8)
    axes.set_ylim(len(lines), -1)
    axes.set_xscale("log")
    axes.set_xlabel("GB/s of floor bytes")
    axes.grid(alpha=0.25, which="both")


def _speed(row: Row, seconds: float) -> float:
    return row.floor_bytes / seconds / GIGA


def _legend(figure: Figure, backends: list[str]) -> None:
    handles = [
        Line2D([], [], marker=look(index).marker, linestyle="", color=look(index).color, label=backend)
        for index, backend in enumerate(backends)
    ]
    handles.append(Line2D([], [], marker="x", linestyle="", color=TORCH_COLOR, label=BASELINE))
    handles.append(Line2D([], [], color="black", label="copies, read and written"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=9)
