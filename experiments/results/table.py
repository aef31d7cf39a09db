"""The comparison as a table."""

from __future__ import annotations

from dataclasses import dataclass

from rich.filesize import decimal
from rich.table import Table

from .comparison import Results, RunResult
from .rows import milliseconds
from .time_to_loss import TimeToLoss, digits, meaning, times_to_loss

HEADINGS = (
    "step time",
    "speed-up",
    "time to loss",
    "sent per step",
    "ratio",
    "training loss",
    "validation loss",
    "accuracy",
)
DETAILS = ("step p95", "encode", "wait", "decode", "peak memory", "planned memory")
NEVER = "never"


@dataclass(frozen=True)
class Row:
    """A run as text, in the order of `HEADINGS` and `DETAILS`."""

    compressor: str
    figures: tuple[str, ...]
    details: tuple[str, ...]


def rows(results: Results) -> list[Row]:
    """Return all runs as text; `speed-up` is that of a step over the first run."""
    times = times_to_loss(results)
    return [_row(run, time, results) for run, time in zip(results.runs, times, strict=True)]


def _row(run: RunResult, to_loss: TimeToLoss | None, results: Results) -> Row:
    p50, baseline = run.step_seconds["p50"], results.runs[0]
    figures = (
        milliseconds(p50),
        f"{baseline.step_seconds['p50'] / p50:.2f}x",
        _to_loss(to_loss),
        decimal(round(run.sent_bytes_per_step)),
        f"{run.compression_ratio:.2f}",
        f"{final_loss(run):.3f}",
        f"{run.eval.loss:.3f}",
        f"{run.eval.accuracy:.1%}",
    )
    seconds = (run.step_seconds["p95"], run.seconds.encode, run.seconds.wait, run.seconds.decode)
    memory = "" if run.peak_memory_bytes is None else decimal(run.peak_memory_bytes)
    planned = _planned(run, results.model["parameters"])
    return Row(run.compressor, figures, (*map(milliseconds, seconds), memory, planned))


def _planned(run: RunResult, parameters: int) -> str:
    """State and peak in words, and the peak's bytes for each parameter."""
    state = "" if run.planned_state_bytes is None else f"state {decimal(run.planned_state_bytes)}, "
    peak = run.planned_bytes
    return "" if peak is None else f"{state}peak {decimal(peak)}, {peak / parameters:.2f} bytes per parameter"


def _to_loss(time: TimeToLoss | None) -> str:
    """Return the median, and behind it the quartiles of repeats."""
    if time is None:
        return NEVER
    low, median, high = time.quartiles
    return f"{digits(median)} s" + (f" ({digits(low)}-{digits(high)})" if len(time.repeats) > 1 else "")


def final_loss(run: RunResult) -> float:
    """Mean training loss of the last tenth of the steps."""
    last = run.loss[-max(1, len(run.loss) // 10) :]
    return sum(last) / len(last)


def table(results: Results) -> Table:
    """The runs for a terminal."""
    model = f"{results.model['name']} ({results.model['parameters']:,} parameters) on {results.data['name']}"
    title = f"{model}, {results.ranks}"
    shown = Table(title=title, title_justify="left", caption=meaning(results), caption_justify="left")
    shown.add_column("compressor", no_wrap=True)
    for heading in HEADINGS:
        shown.add_column(heading.replace(" ", "\n", 1), justify="right")
    for row in rows(results):
        shown.add_row(row.compressor, *row.figures)
    return shown
