"""What has changed between two files of the benchmark, in words and lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .files import Pairs
from .rows import NO_DDP
from .show import place, rate, value

SHOWN = ("p75", "p95")
GATE = "p75"
NAME_WIDTH, VALUE_WIDTH = 22, 24
LEGEND = "diff: how much less time an iteration takes in the test, so that + is faster and - is slower"


@dataclass(frozen=True)
class Line:
    """One row of the baseline and its partner, in words; `grown`: by how many percent sec/iter did, at `GATE`."""

    place: str
    settings: tuple[str, ...]
    figures: tuple[tuple[str, str, str], ...]  # sec/iter, ex/sec and diff of each of SHOWN
    grown: float
    bare: bool


@dataclass(frozen=True)
class ModelTable:
    """The lines of one model."""

    title: str
    lines: Sequence[Line]


def model_tables(pairs: Pairs) -> list[ModelTable]:
    """What to show of each model, in the order of the baseline."""
    titles: dict[str, list[Line]] = {}
    for base, test in pairs.both:
        title = f"{base['model']} with batch size {base['batch_size']}"
        titles.setdefault(title, []).append(line(base, test, pairs.factors))
    return [ModelTable(title, lines) for title, lines in titles.items()]


def line(base: Mapping[str, Any], test: Mapping[str, Any], factors: Sequence[str]) -> Line:
    """One row of the baseline and its partner in words."""
    before, after = base["measurements"]["sec_per_iter"], test["measurements"]["sec_per_iter"]
    rates = test["measurements"]["ex_per_sec"]
    grown = {name: 100 * (after[name] - before[name]) / before[name] for name in SHOWN}
    bare = base["ddp"] == NO_DDP.ddp
    return Line(
        place(base),
        tuple("" if bare else value(name, base[name]) for name in factors),
        tuple((f"{after[name]:.3f}s", rate(rates[name]), f"{0.0 - grown[name]:+.1f}%") for name in SHOWN),
        grown[GATE],
        bare,
    )


def regressions(parts: Sequence[ModelTable], fail_over: float) -> list[str]:
    """What has become slower than is allowed; one rank without DistributedDataParallel only tells of the machine."""
    return [
        f"REGRESSION: {part.title}, {' '.join((each.place.strip(), *each.settings))}: sec/iter {GATE} has grown by "
        f"{each.grown:.1f} %, more than {fail_over:g} %"
        for part in parts
        for each in part.lines
        if not each.bare and each.grown > fail_over
    ]


def missing(pairs: Pairs) -> list[str]:
    """What the test has no figures of, as where its benchmark has ended early; `no ddp` may be left out."""
    return [
        f"REGRESSION: {_named(row, pairs.factors)} is missing in the test"
        for row in pairs.base_only
        if row["ddp"] != NO_DDP.ddp
    ]


def as_text(facts: Sequence[tuple[str, str, str]], parts: Sequence[ModelTable], pairs: Pairs) -> Iterator[str]:
    """Facts, then a table a model."""
    bar = "-" * VALUE_WIDTH
    yield f"{'':{NAME_WIDTH}}{'baseline':>{VALUE_WIDTH}}      {'test':>{VALUE_WIDTH}}"
    yield f"{'':{NAME_WIDTH}}{bar:>{VALUE_WIDTH}}      {bar:>{VALUE_WIDTH}}"
    for name, before, after in facts:
        yield f"{name + ':':{NAME_WIDTH}}{before:>{VALUE_WIDTH}}  vs  {after:>{VALUE_WIDTH}}"
    for part in parts:
        yield f"\nBenchmark: {part.title}\n"
        yield from _table(part, pairs.factors)
    yield f"\n{LEGEND}"
    yield from unmatched(pairs)


def _table(part: ModelTable, factors: Sequence[str]) -> Iterator[str]:
    columns = zip(factors, *(each.settings for each in part.lines), strict=True)
    widths = [max(map(len, column)) for column in columns]
    places = max(len(each.place) for each in part.lines)
    names = (f"{name:<{width}}  " for name, width in zip(factors, widths, strict=True))
    headings = (f"{'sec/iter':>14}{'ex/sec':>11}{'diff':>9}" for _ in SHOWN)
    yield " " * (places + 3) + "".join(names) + "  ".join(headings)
    for each in part.lines:
        settings = (f"{text:<{width}}  " for text, width in zip(each.settings, widths, strict=True))
        figures = (
            f"{name}:  {seconds:>8} {samples:>10} {change:>8}"
            for name, (seconds, samples, change) in zip(SHOWN, each.figures, strict=True)
        )
        yield f"{each.place}:  " + "".join(settings) + "  ".join(figures)


def unmatched(pairs: Pairs) -> list[str]:
    """What cannot be compared."""
    sides = (("baseline", pairs.base_only), ("test", pairs.test_only))
    return [
        f"only in the {side}: " + "; ".join(_named(row, pairs.factors) for row in rows) for side, rows in sides if rows
    ]


def _named(row: Mapping[str, Any], factors: Sequence[str]) -> str:
    words = [row["model"], place(row).strip(), f"batch size {row['batch_size']}"]
    return ", ".join(words + [value(name, row[name]) for name in factors if name in row])
