"""Charts of a page: lines or points that its script draws, to hover over, hide and see on logarithmic axes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..results.comparison import Results, RunResult
from ..results.palette import look
from ..results.statistics import smoothed

DIGITS = 5  # of a number in a page


@dataclass(frozen=True)
class Series:
    """A line, or points, by what stands in the legend."""

    name: str
    across: Sequence[float]
    up: Sequence[float]


@dataclass(frozen=True)
class Chart:
    """Series over common axes. `lines`: whether points of a series are joined."""

    title: str
    across: str
    up: str
    series: Sequence[Series]
    lines: bool = True

    @property
    def data(self) -> str:
        """What the page's script reads, as JSON that may stand in HTML."""
        axes = {"title": self.title, "across": self.across, "up": self.up, "lines": self.lines}
        series = [_drawn(index, each) for index, each in enumerate(self.series)]
        return json.dumps({**axes, "series": series}, allow_nan=False).replace("<", "\\u003c")


def _drawn(index: int, series: Series) -> dict[str, object]:
    color, marker, style = look(index)
    known = [
        (_short(x), _short(y))
        for x, y in zip(series.across, series.up, strict=True)
        if math.isfinite(x) and math.isfinite(y)
    ]
    return {"name": series.name, "color": color, "marker": marker, "dashed": style != "-", "points": known}


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def comparison_charts(results: Results) -> list[Chart]:
    """Loss by step and by time, and accuracy against speed, of runs on one network."""
    runs = results.runs
    loss = "training loss, nats (smoothed)"
    return [
        Chart("Loss by step", "step", loss, [_curve(run, range(1, run.steps + 1)) for run in runs]),
        Chart("Loss by time", "seconds of training", loss, [_curve(run, run.train_seconds) for run in runs]),
        Chart(
            "Accuracy against speed",
            "steps a second (median)",
            "held-out accuracy, %",
            [Series(run.compressor, [1 / run.step_seconds["p50"]], [100 * run.eval.accuracy]) for run in runs],
            lines=False,
        ),
    ]


def _curve(run: RunResult, across: Sequence[float]) -> Series:
    return Series(run.compressor, across, smoothed(run.loss))
