"""Bus bandwidth against size, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..results.picture import DPI
from .measure import BYTES

MB = 1e6


def draw(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """Draw what `gradwire collective` has measured, a panel for each operation; where that is."""
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    figure = Figure(figsize=(max(6.0, 4.5 * len(operations)), 4), layout="constrained")
    panels = figure.subplots(1, len(operations), sharey=True, squeeze=False)[0]
    for axes, operation in zip(panels, operations, strict=True):
        _panel(axes, operation, [row for row in rows if row["operation"] == operation])
    panels[0].set_ylabel("bus bandwidth, MB/s")
    panels[0].legend(fontsize=8)
    figure.suptitle(", ".join([f"{rows[0]['world_size']} ranks", *rows[0]["labels"]]), fontsize=11)
    figure.savefig(path, dpi=DPI)
    return path


def _panel(axes: Axes, operation: str, rows: Sequence[dict[str, Any]]) -> None:
    for backend in dict.fromkeys(row["backend"] for row in rows):
        points = [
            (BYTES * row["elements"] / MB, row["bus_bytes_per_second"] / MB)
            for row in rows
            if row["backend"] == backend
        ]
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=backend)
    axes.set_title(operation.replace("_", "-"), fontsize=10)
    axes.set_xlabel("MB in a piece")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
