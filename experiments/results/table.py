"""The comparison as a table."""

from __future__ import annotations

from dataclasses import dataclass

from rich.filesize import decimal
from rich.table import Table

from .comparison import Results, RunResult

HEADINGS = ("step p50", "p95", "speed", "sent a step", "ratio", "train loss", "eval loss", "accuracy")
DETAILS = ("encode", "wait", "decode", "peak memory")


@dataclass(frozen=True)
class Row:
    """A run as text, in the order of `HEADINGS` and `DETAILS`."""

    compressor: str
    figures: tuple[str, ...]
    details: tuple[str, ...]


def rows(results: Results) -> list[Row]:
    """All runs as text; `speed` is relative to the first run."""
    return [_row(run, results.runs[0]) for run in results.runs]


def _row(run: RunResult, baseline: RunResult) -> Row:
    p50 = run.step_seconds["p50"]
    figures = (
        milliseconds(p50),
        milliseconds(run.step_seconds["p95"]),
        f"{baseline.step_seconds['p50'] / p50:.2f}x",
        decimal(round(run.sent_bytes_per_step)),
        f"{run.compression_ratio:.2f}",
        f"{final_loss(run):.3f}",
        f"{run.eval.loss:.3f}",
        f"{run.eval.accuracy:.1%}",
    )
    seconds = (run.seconds.encode, run.seconds.wait, run.seconds.decode)
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
    shown = Table(title=f"{model}, {results.ranks}", title_justify="left")
    shown.add_column("compressor", no_wrap=True)
    for heading in HEADINGS:
        shown.add_column(heading, justify="right")
    for row in rows(results):
        shown.add_row(row.compressor, *row.figures)
    return shown
