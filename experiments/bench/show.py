"""The benchmark in words: its header, and a table of what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.filesize import decimal
from rich.table import Table

from ..results.words import filled_in
from .rows import FACTORS, NO_DDP, PHASES, Case

PLAIN: Mapping[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}  # how lines are printed
PERCENTILES = ("p50", "p95")  # in the table; the file has more
KEPT_UP = 1.2  # times the seconds of the emulated accelerator


def header(document: Mapping[str, Any]) -> Iterator[str]:
    """Versions, the host and its networks, and what is emulated."""
    about = document["environment"]
    yield f"gradwire {document['gradwire']}, torch {document['torch']}, CUDA {about['cuda'] or 'none'}"
    yield (
        f"{about['world_size']} ranks on {about['device']} by {about['backend']}, started by {about['launched_by']}, "
        f"hosts: {', '.join(about['hosts'])}"
    )
    yield ", ".join(
        [about["processor"], f"{about['cores']} cores, {about['threads']} threads per rank", *about["gpus"]]
    )
    for each in about["interfaces"]:
        speed = f"{each['speed_mbit']} Mbit/s" if each["speed_mbit"] else "speed unknown"
        addresses = " ".join(each["addresses"]) or "no address"
        yield f"network interface {each['name']}, {each['state'] or 'state unknown'}, {addresses}, {speed}"
    yield from (f"NOT REAL: {each}" for each in document["labels"])


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
    return f"{setting} order" if factor == "order" else str(setting)


def common(cases: Sequence[Case]) -> str:
    """Return the factors that all settings share, in words."""
    same = [name for name in FACTORS if name not in varied(cases)]
    words = [value(name, getattr(cases[0], name)) for name in same]
    return ", ".join(f"{word} DDP" if name == "ddp" else word for name, word in zip(same, words, strict=True))


def late(rows: Sequence[Mapping[str, Any]], cases: Sequence[Case]) -> list[str]:
    """Return a line for each row in which this host did not keep up with the emulated accelerator."""
    return [
        f"{', '.join([place(row), *(value(name, row[name]) for name in varied(cases))])}: forward and backward took "
        f"{row['stretch']:.1f}x the time of the emulated accelerator, since this host did not keep up. A larger "
        "--dilate leaves it more time"
        for row in rows
        if (row["stretch"] or 1.0) > KEPT_UP
    ]


def filled(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line about the options that were added to compressors, if there were any."""
    return list(filter(None, [filled_in([(row["compressor"], row["tuned"]) for row in rows], "SGD with momentum")]))


def place(row: Mapping[str, Any]) -> str:
    """Return the ranks of a row and their places: `2 ranks 1M/2G` is one host with two."""
    count = row["world_size"]
    where = "no ddp" if row["ddp"] == NO_DDP.ddp else f"{row['machines']}M/{row['ranks_per_machine']}G"
    return f"{count} rank{'s' if count > 1 else ''} {where}"


def table(rows: Sequence[Mapping[str, Any]], cases: Sequence[Case]) -> Table:
    """A row for each setting: seconds and samples of an iteration, where the seconds went, and what it sent."""
    factors = varied(cases)
    table = Table(caption="phases: medians; exposed: communication after the last gradient", caption_justify="left")
    for heading in ("ranks", *factors):
        table.add_column(heading, no_wrap=True)
    for heading in (*(f"sec/iter\n{name}" for name in PERCENTILES), "ex/sec\np50", *PHASES, "sent\nper rank", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        bare, measured = row["ddp"] == NO_DDP.ddp, row["measurements"]
        settings = ("" if bare else value(name, row[name]) for name in factors)
        seconds = (f"{measured['sec_per_iter'][name]:.3f} s" for name in PERCENTILES)
        phases = (f"{row['phases'][name] * 1000:.1f} ms" for name in PHASES)
        sent = () if bare else (decimal(round(row["sent_bytes_per_step"])), f"{row['compression_ratio']:.2f}")
        table.add_row(place(row), *settings, *seconds, f"{measured['ex_per_sec']['p50']:.1f}", *phases, *sent)
    return table
