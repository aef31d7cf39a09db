"""Files of the benchmark, gradwire's and PyTorch's, as one kind of rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..results.statistics import percentiles
from .rows import FACTORS, KIND, NO_DDP

RESULTS = "benchmark_results"
ALWAYS = ("gradwire_version", "pytorch_version", "cuda_version", "distributed_backend")  # shown in any case
NOT_REAL = "not real"  # the fact that holds what was emulated
LEFT_OUT = ("json",)  # keys of the configuration that do not change what is measured
ABOUT = ("world_size", "device", "processor", "cores", "threads", "gpus", "hosts", "launched_by", "platform")
PYTORCHS = ("model", "batch_size", "result")  # keys of an entry of PyTorch's file
SAME = ("model", "batch_size", "world_size", "machines")  # in two rows that are compared


@dataclass(frozen=True)
class Benchmark:
    """A file: `facts` by name, as text, and rows as `gradwire bench` writes them."""

    path: Path
    facts: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]

    def varied(self) -> set[str]:
        """The factors in which its settings differ."""
        settings = [row for row in self.rows if row["ddp"] != NO_DDP.ddp]
        return {name for name in FACTORS if len({row.get(name) for row in settings}) > 1}


def read(path: Path) -> Benchmark:
    """A file of `gradwire bench --json`, or of PyTorch's benchmark. Raises ValueError for anything else."""
    try:
        document = json.loads(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(document, Mapping) or not isinstance(document.get(RESULTS), list):
        raise ValueError(f"{path} is no file of gradwire bench --json: it has no {RESULTS}")
    if not document[RESULTS]:
        raise ValueError(f"{path} has no results: its benchmark ended before the first row")
    try:
        rows = document[RESULTS] if document.get("kind") == KIND else list(_pytorchs(document[RESULTS]))
        Benchmark(path, {}, rows).varied()
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path} is no file of gradwire bench --json: {type(error).__name__} {error}") from error
    return Benchmark(path, dict(_facts(document)), rows)


def _facts(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, found in document.items():
        if name not in ("kind", "command", "labels", "environment", "config", RESULTS):
            yield name, str(found)
    about = document.get("environment", {})
    yield from ((name, str(about[name])) for name in ABOUT if name in about)
    for name, found in document.get("config", {}).items():
        if name not in LEFT_OUT:
            yield f"config.{name}", json.dumps(found) if isinstance(found, dict) else _words(found)
    if document.get("labels"):
        yield NOT_REAL, "; ".join(document["labels"])


def _words(found: Any) -> str:
    return (",".join(map(str, found)) or "-") if isinstance(found, list) else str(found)


def _pytorchs(results: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows of PyTorch's file: of each model the first is without DistributedDataParallel, machines have 8 ranks."""
    for entry in results:
        model, batch_size, measured = (entry[key] for key in PYTORCHS)
        for index, each in enumerate(measured):
            count = len(each["ranks"])
            machines = max(1, count // 8)
            seconds = percentiles(each["measurements"])
            yield {
                "model": model,
                "batch_size": batch_size,
                "world_size": count,
                "machines": machines,
                "ranks_per_machine": count // machines,
                "ddp": "torch" if index else NO_DDP.ddp,
                "measurements": {
                    "sec_per_iter": seconds,
                    "ex_per_sec": {name: batch_size / value for name, value in seconds.items()},
                },
            }


def differing(base: Benchmark, test: Benchmark) -> list[tuple[str, str, str]]:
    """(name, in the baseline, in the test) of what differs between two files, of versions, and of what was emulated."""
    names = [*ALWAYS, *sorted({*base.facts, *test.facts} - {*ALWAYS})]
    pairs = [(name, base.facts.get(name, "-"), test.facts.get(name, "-")) for name in names]
    return [(name, one, other) for name, one, other in pairs if one != other or name in (*ALWAYS, NOT_REAL)]


@dataclass(frozen=True)
class Pairs:
    """Rows of the same model, ranks and setting in two files, and what only one of them has.

    `factors`: those that tell the rows of one file apart. A factor with one value in each file may differ between them.
    """

    factors: Sequence[str]
    both: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
    base_only: Sequence[Mapping[str, Any]]
    test_only: Sequence[Mapping[str, Any]]


def paired(base: Benchmark, test: Benchmark) -> Pairs:
    """Match the rows of two files."""
    varied = base.varied() | test.varied()
    factors = [name for name in FACTORS if name in varied]

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        bare = row["ddp"] == NO_DDP.ddp
        return (*(row[name] for name in SAME), bare, *(None if bare else row.get(name) for name in factors))

    ours, theirs = {key(row): row for row in base.rows}, {key(row): row for row in test.rows}
    return Pairs(
        factors,
        [(row, theirs[where]) for where, row in ours.items() if where in theirs],
        [row for where, row in ours.items() if where not in theirs],
        [row for where, row in theirs.items() if where not in ours],
    )
