"""The comparison as a table."""

from __future__ import annotations

from dataclasses import dataclass

from rich.filesize import decimal
from rich.table import Table

from .comparison import Results, RunResult
from .time_to_loss import meaning, times_to_loss

HEADINGS = ("step p50", "speed", "time to loss", "sent a step", "ratio", "train loss", "eval loss", "accuracy")
DETAILS = ("step p95", "encode", "wait", "decode", "peak memory")
NEVER = "never"


@dataclass(frozen=True)
class Row:
    """A run as text, in the order of `HEADINGS` and `DETAILS`."""

    compressor: str
    figures: tuple[str, ...]
    details: tuple[str, ...]


def rows(results: Results) -> list[Row]:
    """All runs as text; `speed` is relative to the first run."""
    times = times_to_loss(results)
    return [_row(run, time, results.runs[0]) for run, time in zip(results.runs, times, strict=True)]


def _row(run: RunResult, to_loss: float | None, baseline: RunResult) -> Row:
    p50 = run.step_seconds["p50"]
    figures = (
        milliseconds(p50),
        f"{baseline.step_seconds['p50'] / p50:.2f}x",
        NEVER if to_loss is None else f"{to_loss:.1f} s",
        decimal(round(run.sent_bytes_per_step)),
        f"{run.compression_ratio:.2f}",
        f"{final_loss(run):.3f}",
        f"{run.eval.loss:.3f}",
        f"{run.eval.accuracy:.1%}",
    )
    seconds = (run.step_seconds["p95"], run.seconds.encode, run.seconds.wait, run.seconds.decode)
    return Row(run.compressor, figures, (*map(milliseconds, seconds), decimal(run.peak_memory_bytes)))


def milliseconds(seconds: float) -> str:
    """Seconds as text in milliseconds."""
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"


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
        shown.add_column(heading, justify="right")
    for row in rows(results):
        shown.add_row(row.compressor, *row.figures)
    return shown
