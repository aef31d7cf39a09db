"""What a link and an accelerator do during two steps, in backward's order and by priority, as replay has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ...ddp_core.overlap.replay import Replay, backward_order, priority_order, replay
from ...ddp_core.overlap.step_model import StepModel
from ..results.palette import COLORS, DPI

STEPS = 2
HEIGHT = 0.8  # of a row
FORWARD, BACKWARD = COLORS[0], COLORS[1]


def draw(buckets: StepModel, slices: StepModel, title: str, path: Path) -> Path:
    """Two pictures above each other: `buckets` as a synchronous step sends them, and `slices` by priority; where that is."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    waiting = replay(buckets, backward_order(buckets), until_needed=False)
    _steps(above, buckets, waiting, until_needed=False)
    _steps(below, slices, replay(slices, priority_order(slices)), until_needed=True)
    above.set_title("backward's order: forward waits for everything", fontsize=10, loc="left")
    below.set_title("priority: each layer waits for its own (light pieces are needed first)", fontsize=10, loc="left")
    below.set_xlabel("milliseconds")
    figure.suptitle(f"{title}; computed by replay", fontsize=11)
    handles = [Patch(color=BACKWARD, label="backward"), Patch(color=FORWARD, label="forward")]
    below.legend(handles=handles, loc="center right", fontsize=9)
    figure.savefig(path, dpi=DPI)
    return path


def _steps(axes: Axes, model: StepModel, found: Replay, *, until_needed: bool) -> None:
    shades = colormaps["viridis_r"]
    for number in range(STEPS):
        begin = number * found.step
        for piece, start in zip(model.pieces, found.started, strict=True):
            share = piece.needed / model.forward if model.forward else 0.0
            _bar(axes, 0, begin + start, piece.wire, shades(share))
        _bar(axes, 1, begin, model.backward, BACKWARD)
        for start, seconds in forward_spans(model, found, until_needed=until_needed):
            _bar(axes, 1, begin + start, seconds, FORWARD)
    axes.set_yticks([0, 1], ["link", "computation"])
    axes.text(1.0, 1.05, f"{found.step * 1000:.0f} ms a step", transform=axes.transAxes, ha="right", fontsize=10)


def _bar(axes: Axes, row: int, start: float, seconds: float, color: object) -> None:
    axes.broken_barh([(start * 1000, seconds * 1000)], (row - HEIGHT / 2, HEIGHT), facecolors=color, linewidth=0)


def forward_spans(model: StepModel, found: Replay, *, until_needed: bool) -> Iterator[tuple[float, float]]:
    """(begin, seconds) of what forward computes between its waits, counted from the beginning of backward."""
    last = max([model.backward, *found.arrived])
    now, done = (model.backward if until_needed else last), 0.0
    for needed, arrived in sorted(zip((piece.needed for piece in model.pieces), found.arrived, strict=True)):
        yield now, needed - done
        now, done = max(now + needed - done, arrived), needed
    yield now, model.forward - done
