"""The comparison in words: a table and a verdict."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from rich.filesize import decimal
from rich.table import Table

from .comparison import Results, RunResult

UNCOMPRESSED = ("none", "bf16", "fp16")  # what a user gets without giving anything up
WORTHWHILE = 1.1  # a speed-up below this is not worth a lossy method
SAME_LOSS = 0.03  # relative difference in held-out loss that counts as none
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


def verdict(results: Results) -> str:
    """Whether compression pays here, by step time at the same held-out loss, against the fastest uncompressed run.

    Runs that were warming up to their end are left out, and named.
    """
    cold = [run.compressor for run in results.runs if not run.warmed_up]
    told = _verdict(dataclasses.replace(results, runs=tuple(run for run in results.runs if run.warmed_up)))
    if not cold:
        return told
    whose = "its warm-up does" if len(cold) == 1 else "their warm-ups do"
    return f"{told} Left out: {', '.join(cold)}, as {whose} not end within the run."


def _verdict(results: Results) -> str:
    plain = [run for run in results.runs if run.compressor in UNCOMPRESSED]
    if not plain or len(plain) == len(results.runs):
        return "No verdict: it takes a run of none, bf16 or fp16 and one of another compressor."
    best_loss = min((run.eval.loss for run in plain if math.isfinite(run.eval.loss)), default=math.nan)
    kept = [run for run in results.runs if run.eval.loss <= best_loss * (1 + SAME_LOSS)]
    reference = min(plain, key=lambda run: run.step_seconds["p50"])
    fastest = min(kept, key=lambda run: run.step_seconds["p50"], default=reference)
    gain = reference.step_seconds["p50"] / fastest.step_seconds["p50"]
    if fastest in plain or gain < WORTHWHILE:
        return (
            f"Do not compress further here: at the same held-out loss (within {SAME_LOSS:.0%}) no method makes a step "
            f"{WORTHWHILE:.1f}x as fast as {reference.compressor}. {_where(results)}"
        )
    return (
        f"{fastest.compressor} makes a step {gain:.2f}x as fast as {reference.compressor} and keeps the held-out loss "
        f"(within {SAME_LOSS:.0%}), over {results.runs[0].steps} steps. {_where(results)}"
    )


def _where(results: Results) -> str:
    if network := results.environment.get("network"):
        return f"Network: {network}."
    if results.environment.get("launched_by", "gradwire") != "gradwire":
        return "Steps and network are those of this run."
    return (
        "These ranks share one machine: start `gradwire compare` with torchrun on your hosts to measure your network."
    )
