"""A claim: a figure of a page, where it comes from, and how it is computed."""

import csv
import json
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from statistics import mean
from typing import Any

from gradwire.experiments.results.statistics import interval

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs" / "results"
DECIDE = 6  # seeds: if all are higher, a sign test sees a difference at 5 per cent
MEASURED, PREDICTED, PUBLISHED, SETTING = KINDS = ("measured", "predicted", "published", "setting")


@dataclass(frozen=True)
class Source:
    """A file of raw points (or of code, for settings), and what was run. `seeds`: if they are not those of the values."""

    file: str
    command: str
    machine: str
    model: str = ""
    steps: str = ""
    warm_up: str = ""
    seeds: int = 0


@cache
def last_commit(file: str) -> str:
    """Return the commit that last changed a file; empty outside a clone, and for other people's pages."""
    line = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", file]
    return subprocess.run(line, capture_output=True, text=True, check=False).stdout.strip()


@dataclass(frozen=True)
class Claim:
    """A figure. `compute` returns a value per seed, or one; `form` makes the text of the pages from them."""

    name: str
    kind: str
    source: Source
    compute: Callable[[], Sequence[float]]
    form: Callable[[Sequence[float]], str]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is one of {KINDS}, got {self.kind!r}")

    @cached_property
    def values(self) -> tuple[float, ...]:
        """The computed values, one per seed."""
        return tuple(self.compute())

    @property
    def text(self) -> str:
        """The figure as pages print it."""
        return self.form(self.values)


@cache
def raw(file: str) -> Any:
    """Return the contents of a file of points: JSON, or a list of JSON lines."""
    text = (ROOT / file).read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()] if file.endswith(".jsonl") else json.loads(text)


@cache
def study_rows(name: str) -> list[dict[str, Any]]:
    """Return the table of a study, means over its seeds; numbers as numbers, None where a cell is empty."""
    text = (RESULTS / name / "rows.csv").read_text("utf-8")
    return [{key: _value(cell) for key, cell in row.items()} for row in csv.DictReader(text.splitlines())]


def _value(cell: str) -> Any:
    try:
        return float(cell)
    except ValueError:
        return cell or None


def only(values: Iterable[float]) -> tuple[float]:
    """Return the only value."""
    (value,) = values
    return (value,)


def _signed(value: float, digits: int = 1) -> str:
    """Return a number with its sign; zero has none."""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text


def loss(values: Sequence[float]) -> str:
    """Return per cent above the baseline: with three seeds or more a mean and its 95 % interval, else each seed's."""
    if len(values) < 3:
        return " and ".join(map(_signed, values)) + " %"
    width = interval(values)
    if width < min(0.05, abs(mean(values))):
        return f"{mean(values):+.2f} ± {width:.2f} %"
    text = f"{_signed(mean(values))} ± {width:.1f} %"
    higher = min(values) > 0 and float(f"{mean(values):.1f}") > 0
    if higher and len(values) >= DECIDE and mean(values) <= width:
        return f"{text}, and higher on each seed"
    worse = ", but higher on each seed" if higher else ""
    return f"no difference seen ({text}{worse})" if abs(mean(values)) <= width else text


def per_cent(values: Sequence[float]) -> str:
    """Return per cent without a sign."""
    return " and ".join(f"{abs(value):.1f}" for value in values) + " %"


def whole_per_cent(values: Sequence[float]) -> str:
    """Return whole per cent without a sign."""
    return f"{mean(values):.0f} %"


def times(values: Sequence[float]) -> str:
    """Return a speed-up or a factor: two digits, and a range where there are several values."""
    texts = [f"{value:.1f}x" if value < 9.95 else f"{value:.0f}x" for value in (min(values), max(values))]
    return texts[0] if texts[0] == texts[1] else " to ".join(texts)


def finely(values: Sequence[float]) -> str:
    """Return a factor near one."""
    return f"{mean(values):.3f}x"


def number(unit: str, digits: int = 0) -> Callable[[Sequence[float]], str]:
    """Return a form: a number with a unit."""
    return lambda values: f"{mean(values):,.{digits}f} {unit}".strip()
