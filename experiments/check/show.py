"""Tables of `gradwire check` in Markdown, which can be pasted into an issue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.filesize import decimal

AVERAGES = ("compressor", "first average", "expected", "mean of all", "expected")
STEPS = ("compressor", "step", "speed-up", "waits for the network", "sent per rank", "fewer bytes")


def heading(document: Mapping[str, Any]) -> list[str]:
    """Return lines about how the ranks are placed, devices and versions."""
    about, place = document["environment"], document["topology"]
    names = Counter(each["name"] for each in about["gpus"])
    cards = [f"{count} x {name}" for name, count in names.items()] or ["no GPU"]
    between = [f"{count} pair{'s' * (count > 1)} by {kind}" for kind, count in about["between_gpus"].items()]
    hosts = f"{place['hosts']} host{'s' * (place['hosts'] > 1)}"
    return [
        f"{place['ranks']} ranks on {hosts}, {place['backend']} on {place['device']}",
        ", ".join([*cards, *between, f"{about['cpu']['model']}, {about['cpu']['cores']} cores"]),
        ", ".join(f"{name} {version or 'none'}" for name, version in about["versions"].items()),
        f"kernels: {', '.join(about['kernels'])}",
    ]


def averages_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of distances from the exact mean in float64, and of those of a simulation."""
    cells = (
        (row["compressor"], *(f"{row[who][which]:.2g}" for which in ("first", "mean") for who in ("found", "expected")))
        for row in rows
    )
    return ["", "Distance of averages from the mean in float64, as a part of its norm:", "", *_table(AVERAGES, cells)]


def steps_table(rows: Sequence[Mapping[str, Any]], model: str, steps: int) -> list[str]:
    """Return a table of the step times of a model, against the first row."""
    first = rows[0]["measurements"]["sec_per_iter"]["p50"] if rows else 0.0
    cells = []
    for row in rows:
        seconds = row["measurements"]["sec_per_iter"]["p50"]
        sent, ratio = decimal(round(row["sent_bytes_per_step"])), row["compression_ratio"]
        times = f"{1000 * seconds:.1f} ms", f"{first / seconds:.2f}x", f"{1000 * row['phases']['exposed']:.1f} ms"
        cells.append((row["compressor"], *times, sent, f"{ratio:.1f}x"))
    title = f"{model}, medians of {steps} steps on all ranks:"
    return ["", title, "", *_table(STEPS, cells)]


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
