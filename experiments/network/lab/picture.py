"""The use of a link over time, drawn."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from ...results.picture import DPI
from ..link import BITS_PER_BYTE, parse_rate
from .utilization import BITS_PER_MBIT, Utilization

DIRECTIONS = {"sent_bytes": "up, Mbit/s", "received_bytes": "down, Mbit/s"}


def draw(utilization: Utilization, path: Path, host: int = 0, window: tuple[float, float] | None = None) -> Path:
    """Draw what a host sent and received, in Mbit/s over seconds; where that is.

    `window` is the part to show, all traffic if None.
    """
    begin, end = window or utilization.busy(host)
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    limit = parse_rate(utilization.rate) * BITS_PER_BYTE / BITS_PER_MBIT
    for axes, (name, label) in zip(figure.subplots(2, 1, sharex=True), DIRECTIONS.items(), strict=True):
        axes.fill_between(utilization.seconds[1:], utilization.rates(host, name), step="pre", linewidth=0)
        if limit:
            axes.axhline(limit, color="gray", linestyle="--", linewidth=0.8)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
    axes.set_xlabel("seconds")
    axes.set_xlim(begin, end)
    figure.suptitle(f"link of host {host}, {utilization.network}", fontsize=11)
    figure.savefig(path, dpi=DPI)
    return path
