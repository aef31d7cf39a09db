"""`gradwire diff`: two files of the benchmark side by side, for people and for continuous integration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..results.rows import Row
from .rows import FACTORS, KIND, NO_DDP
from .show import PLAIN, place, value

REGRESSION = 1  # exit code
PERCENTILES = ("p75", "p95")
GATE = "p75"
SAME = ("model", "batch_size", "world_size", "machines")  # in two rows that are compared
LEFT_OUT = ("config.json", "environment.interfaces")  # facts that do not change what is measured
LEGEND = "diff: how much less time an iteration takes in the test, so that + is faster and - is slower"


@dataclass(frozen=True)
class DiffConfig:
    """Two files of `gradwire bench --json`, the baseline and the test."""

    base: str = ""
    """file with the baseline, from gradwire bench --json"""
    test: str = ""
    """file to compare with the baseline"""
    fail_over: float | None = None
    """exit with code 1 if a row's 75th-percentile step time grew by more than this many percent, or a row is
    missing"""

    def __post_init__(self) -> None:
        if self.fail_over is not None and not self.fail_over >= 0:
            raise ValueError(f"fail_over is a number of percent, at least 0, got {self.fail_over}")


def diff_command(config: DiffConfig) -> int:
    """Show the difference; the exit code: 1 for a regression that is not allowed."""
    if not config.base or not config.test:
        raise ValueError("diff compares two files: gradwire diff BASE.json TEST.json")
    base, test = _read(Path(config.base)), _read(Path(config.test))
    factors = _factors(base["rows"], test["rows"])
    ours, theirs = ({_key(row, factors): row for row in each["rows"]} for each in (base, test))
    both = [(row, theirs[key]) for key, row in ours.items() if key in theirs]
    if not both:
        raise ValueError(f"{config.base} and {config.test} have no model, batch size and number of ranks in common")
    missing = [row for key, row in ours.items() if key not in theirs]
    added = [row for key, row in theirs.items() if key not in ours]
    console = Console(width=max(Console().width, 120))
    console.print(_facts_table(base, test), _table(both, factors), LEGEND, sep="\n", highlight=False)
    for side, rows in (("baseline", missing), ("test", added)):
        for row in rows:
            console.print(f"only in the {side}: {_named(row, factors)}", **PLAIN)
    failures = [] if config.fail_over is None else list(_regressions(both, missing, factors, config.fail_over))
    for failure in failures:
        console.print(f"REGRESSION: {failure}", **PLAIN)
    return REGRESSION if failures else 0


def _read(path: Path) -> dict[str, Any]:
    """A file of `gradwire bench --json`. Raises ValueError for anything else."""
    try:
        document: dict[str, Any] = json.loads(path.expanduser().read_text(encoding="utf-8"))
        if document["kind"] != KIND:
            raise ValueError(f"its kind is {document['kind']}")
        if not document["rows"]:
            raise ValueError("its benchmark ended before the first row")
        _ = [_key(row, FACTORS) for row in document["rows"]], _facts(document)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no file of gradwire bench --json: {type(error).__name__} {error}") from error
    return document


def _facts(document: Mapping[str, Any]) -> dict[str, str]:
    """Return a file's versions, host, options and emulated parts, by name."""
    parts = {key: document[key] for key in ("gradwire", "torch")} | {"not real": "; ".join(document["labels"])}
    parts |= {f"environment.{name}": found for name, found in document["environment"].items()}
    parts |= {f"config.{name}": found for name, found in document["config"].items()}
    return {name: str(found) for name, found in parts.items() if name not in LEFT_OUT}


def _facts_table(base: Mapping[str, Any], test: Mapping[str, Any]) -> Table:
    """Versions and what was emulated, and all else that differs."""
    table, ours, theirs = Table("", "baseline", "test"), _facts(base), _facts(test)
    for name in dict.fromkeys((*ours, *theirs)):
        before, after = ours.get(name, "-"), theirs.get(name, "-")
        if before != after or (name in ("gradwire", "torch", "not real") and before):
            table.add_row(name, before, after)
    return table


def _factors(*files: Sequence[Row]) -> list[str]:
    """The factors that tell the rows of a file apart; one with a single value in each file may differ between them."""
    settings = [[row for row in rows if row["ddp"] != NO_DDP.ddp] for rows in files]
    return [name for name in FACTORS if any(len({row[name] for row in rows}) > 1 for rows in settings)]


def _key(row: Row, factors: Sequence[str]) -> tuple[Any, ...]:
    """Return the key by which two rows are compared: model, ranks and setting."""
    bare = row["ddp"] == NO_DDP.ddp
    return (*(row[name] for name in SAME), bare, *(None if bare else row[name] for name in factors))


def _grown(base: Row, test: Row, name: str) -> float:
    """By how many percent sec/iter did."""
    before, after = (float(row["measurements"]["sec_per_iter"][name]) for row in (base, test))
    return 100 * (after - before) / before


def _regressions(
    both: Sequence[tuple[Row, Row]], missing: Sequence[Row], factors: Sequence[str], fail_over: float
) -> Iterator[str]:
    """Yield a line for each row that is too slow or missing; `no ddp` does not count, as it shows the host alone."""
    for base, test in both:
        grown = _grown(base, test, GATE)
        if base["ddp"] != NO_DDP.ddp and grown > fail_over:
            yield f"{_named(base, factors)}: sec/iter {GATE} has grown by {grown:.1f} %, more than {fail_over:g} %"
    for row in missing:
        if row["ddp"] != NO_DDP.ddp:
            yield f"{_named(row, factors)} is missing in the test"


def _table(both: Sequence[tuple[Row, Row]], factors: Sequence[str]) -> Table:
    table = Table("model", "batch size", "ranks", *factors)
    for name in PERCENTILES:
        for heading in ("baseline", "test", "diff"):
            table.add_column(f"{name}\n{heading}", justify="right")
    for base, test in both:
        settings = ("" if base["ddp"] == NO_DDP.ddp else value(name, base[name]) for name in factors)
        figures: list[str] = []
        for name in PERCENTILES:
            figures += [f"{row['measurements']['sec_per_iter'][name]:.3f} s" for row in (base, test)]
            figures.append(f"{0.0 - _grown(base, test, name):+.1f}%")
        table.add_row(base["model"], str(base["batch_size"]), place(base), *settings, *figures)
    return table


def _named(row: Row, factors: Sequence[str]) -> str:
    words = [row["model"], place(row), f"batch size {row['batch_size']}"]
    return ", ".join(words + [value(name, row[name]) for name in factors])
