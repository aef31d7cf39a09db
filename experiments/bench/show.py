"""The benchmark in words: its header, a line a row as it is measured, and where the time went."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.filesize import decimal
from rich.table import Table

from .rows import FACTORS, NO_DDP, PHASES, Case

PLAIN: Mapping[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}  # how lines are printed
PERCENTILES = ("p50", "p75", "p90", "p95")
TITLE = "gradwire distributed benchmark"
TOPOLOGY = ("nvidia-smi", "topo", "-m")
TOPOLOGY_SECONDS = 30
KEPT_UP = 1.2  # times the seconds of the emulated accelerator
PLACE_WIDTH = 25  # of `   2 ranks --    1M/2G:  `


def topology() -> str | None:
    """How the GPUs of this machine are connected, as nvidia-smi tells it, or why it does not; None without it."""
    if shutil.which(TOPOLOGY[0]) is None:
        return None
    try:
        done = subprocess.run(TOPOLOGY, capture_output=True, text=True, timeout=TOPOLOGY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not known: {error}"
    return done.stdout.strip() or done.stderr.strip()


def header(environment: Mapping[str, Any], labels: Sequence[str]) -> str:
    """Versions, the machine and its networks, and what is emulated."""
    lines = [
        *(f"* {name}: {value}" for name, value in _facts(environment)),
        *(f"* network interface: {each}" for each in _links(environment["interfaces"])),
        *(f"* NOT REAL: {each}" for each in labels),
    ]
    bar = "-" * len(TITLE)
    text = "\n".join([bar, TITLE, bar, "", *lines, ""])
    if environment["topology"] is not None:
        text += f"\n--- {' '.join(TOPOLOGY)} ---\n\n{environment['topology']}\n\n{'-' * 26}\n"
    return text


def _facts(environment: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    yield "gradwire version", environment["gradwire"]
    yield "PyTorch version", environment["torch"]
    yield "CUDA version", environment["cuda"] or "none"
    yield "distributed backend", environment["backend"]
    yield "ranks", f"{environment['world_size']} on {environment['device']}, started by {environment['launched_by']}"
    yield "hosts", ", ".join(environment["hosts"])
    yield (
        "processor",
        f"{environment['processor']}, {environment['cores']} cores, {environment['threads']} threads a rank",
    )
    if environment["gpus"]:
        yield "GPUs", ", ".join(environment["gpus"])


def _links(interfaces: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    for each in interfaces:
        speed = f"{each['speed_mbit']} Mbit/s" if each["speed_mbit"] else "speed unknown"
        yield f"{each['name']}, {each['state'] or 'state unknown'}, {' '.join(each['addresses']) or 'no address'}, {speed}"


def varied(cases: Iterable[Case]) -> list[str]:
    """The factors in which settings differ."""
    settings = [case for case in cases if case != NO_DDP]
    return [name for name in FACTORS if len({getattr(case, name) for case in settings}) > 1]


def value(factor: str, setting: Any) -> str:
    """A factor's value in words."""
    if factor == "bucket_mb":
        return "default buckets" if setting is None else f"{setting:g} MiB"
    if factor == "process_groups":
        return f"{setting} group{'s' if setting > 1 else ''}"
    if factor == "sync_every":
        return f"sync every {setting}"
    if factor == "overlap":
        return "overlap" if setting else "no overlap"
    if factor == "order":
        return f"{setting} order" if setting == "backward" else str(setting)
    return str(setting)


def common(cases: Sequence[Case]) -> str:
    """What all settings have in common."""
    usual = [name for name in ("order",) if getattr(cases[-1], name) == getattr(NO_DDP, name)]
    same = [name for name in FACTORS if name not in (*varied(cases), *usual)]
    words = [value(name, getattr(cases[0], name)) for name in same]
    return ", ".join(f"{word} DDP" if name == "ddp" else word for name, word in zip(same, words, strict=True))


class Lines:
    """Rows as lines of equal columns, so that each can be printed when it is there."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self._factors = varied(cases)
        columns = ([name, *(value(name, getattr(case, name)) for case in cases)] for name in self._factors)
        self._widths = [max(map(len, column)) for column in columns]

    def headings(self) -> str:
        """The line above the rows."""
        names = (f"{name:<{width}}  " for name, width in zip(self._factors, self._widths, strict=True))
        figures = (f"{'sec/iter':>13}{'ex/sec':>10}" for _ in PERCENTILES)
        return " " * PLACE_WIDTH + "".join(names) + "  ".join(figures)

    def line(self, row: Mapping[str, Any]) -> str:
        """A row."""
        factors = zip(self._factors, self._widths, strict=True)
        bare = row["ddp"] == NO_DDP.ddp
        settings = (f"{'' if bare else value(name, row[name]):<{width}}  " for name, width in factors)
        times, rates = row["measurements"]["sec_per_iter"], row["measurements"]["ex_per_sec"]
        figures = (f"{name}: {times[name]:7.3f}s {rate(rates[name]):>9}" for name in PERCENTILES)
        return f"{place(row)}:  " + "".join(settings) + "  ".join(figures)


def late(rows: Sequence[Mapping[str, Any]], cases: Sequence[Case]) -> list[str]:
    """Where this machine did not keep up with the accelerator that it emulates."""
    return [
        f"{place(row).strip()}, {' '.join(value(name, row[name]) for name in varied(cases))}: forward and backward took "
        f"{row['stretch']:.1f}x what they do on the emulated accelerator, since this machine did not keep up; a larger "
        "--dilate leaves it more time"
        for row in rows
        if row.get("stretch", 1.0) > KEPT_UP
    ]


def place(row: Mapping[str, Any]) -> str:
    """How many ranks, and where: `   2 ranks --    1M/2G`."""
    count = row["world_size"]
    where = "no ddp" if row["ddp"] == NO_DDP.ddp else f"{row['machines']}M/{row['ranks_per_machine']}G"
    return f"{count:>4} {'rank ' if count == 1 else 'ranks'} -- {where:>8}"


def rate(samples: float) -> str:
    """Samples a second: whole ones from 100 on."""
    return f"{samples:.0f}/s" if samples >= 100 else f"{samples:.1f}/s"


def phases(rows: Sequence[Mapping[str, Any]], cases: Sequence[Case]) -> Table:
    """Where the seconds of an iteration went, and what it sent."""
    factors = varied(cases)
    table = Table(title="medians of an iteration; exposed: communication after the last gradient", title_justify="left")
    for heading in ("ranks", *factors):
        table.add_column(heading, no_wrap=True)
    for heading in (*PHASES, "sent a rank", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        bare = row["ddp"] == NO_DDP.ddp
        settings = ("" if bare else value(name, row[name]) for name in factors)
        times = (f"{row['phases'][name] * 1000:.1f} ms" for name in PHASES)
        sent = () if bare else (decimal(round(row["sent_bytes_per_step"])), f"{row['compression_ratio']:.2f}")
        table.add_row(" ".join(place(row).replace("--", "").split()), *settings, *times, *sent)
    return table
