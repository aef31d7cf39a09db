"""The validation losses of several seeds: means, and how far they are from those of 16 bits."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from rich.table import Table

from .comparison import Results, RunResult
from .statistics import interval, per_cent
from .time_to_loss import reference


def over_seeds(results: Results) -> tuple[Mapping[str, Any], ...]:
    """Return a row for each network and compressor: its mean validation loss, and by how many per cent it is above that of
    bf16 with the same seed, with half the width of the 95 % interval; none where all runs have one seed.

    Another uncompressed run takes the place of bf16 where that is missing.
    """
    if len({run.seed for run in results.runs}) < 2:
        return ()
    return tuple(_row(runs, each) for each in results.by_network() for runs in _by_compressor(each))


def _by_compressor(results: Results) -> list[list[RunResult]]:
    names = dict.fromkeys(run.compressor for run in results.runs)
    return [[run for run in results.runs if run.compressor == name] for name in names]


def _row(runs: list[RunResult], results: Results) -> Mapping[str, Any]:
    wanted = reference(results)
    row: dict[str, Any] = {"compressor": runs[0].compressor, "network": runs[0].network, "seeds": len(runs)}
    row |= {"loss": fmean(run.eval.loss for run in runs), "against": None, "percent": None, "interval": None}
    if wanted is None or wanted.compressor == runs[0].compressor:
        return row
    others = {run.seed: run.eval.loss for run in results.runs if run.compressor == wanted.compressor}
    excess = [100 * (run.eval.loss / others[run.seed] - 1) for run in runs if run.seed in others]
    return {**row, "against": wanted.compressor, "percent": fmean(excess), "interval": interval(excess)}


def seeds_table(results: Results) -> Table | None:
    """Return the rows for a terminal; None where there are none."""
    rows = over_seeds(results)
    if not rows:
        return None
    against = next(filter(None, (row["against"] for row in rows)), "an uncompressed run")
    caption = f"Against {against} with the same seed; 95 % intervals by Student's t."
    shown = Table(title="All seeds", title_justify="left", caption=caption, caption_justify="left")
    shown.add_column("compressor", no_wrap=True)
    for heading in ("seeds", "validation loss", "difference"):
        shown.add_column(heading, justify="right")
    for row in rows:
        difference = "" if row["percent"] is None else per_cent(row["percent"], row["interval"])
        shown.add_row(row["compressor"], str(row["seeds"]), f"{row['loss']:.3f}", difference)
    return shown


def seeds_line(row: Mapping[str, Any]) -> str:
    """Return a row as a sentence."""
    told = f"{row['compressor']}: mean validation loss of {row['seeds']} seeds {row['loss']:.3f}"
    against = (
        "" if row["percent"] is None else f", against {row['against']} {per_cent(row['percent'], row['interval'])}"
    )
    return f"{told}{against}."
