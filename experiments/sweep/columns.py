"""Columns computed from others and from rows to compare with; rows that differ in their seed as one row of means."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..network.link import parse_rate
from ..results.rows import Row
from ..results.statistics import smoothed, steps_to

RUNS = "runs"  # the column with the number of rows of a mean
SPREAD = ".spread"  # behind the name of a column: how far the numbers of a mean spread
SOURCE = "data.source"  # the column of the data; rows of other data, such as packages of another day, are not compared


def speedup(row: Row, other: Row, *, of: str) -> float | None:
    """Return the column of the other row over this row's: 2 is twice as fast."""
    return _divided(other.get(of), row.get(of))


def ratio(row: Row, other: Row, *, of: str, over: str | None = None, percent: bool = False) -> float | None:
    """A column over that of the other row, or over another column; `percent`: by how many per cent it is larger."""
    found = _divided(row.get(of), other.get(over or of))
    return 100 * (found - 1) if percent and found is not None else found


def time_to_loss(
    row: Row, other: Row, *, at: float = 1.0, within: float = 0.0, seconds: str = "train_seconds"
) -> float | None:
    """Seconds of training until the smoothed loss is at most what the other row ends with; None where it never is.

    `at`: or has after that share of its steps, so that who learns a little less from a step has some left to get there.
    `within`: the target lies that much above it, relative.
    """
    if not 0 < at <= 1:
        raise ValueError(f"at is a share of the steps, above 0 and up to 1; got {at}")
    curves: list[Any] = [other.get("loss"), row.get("loss"), row.get(seconds)]
    if any(curve is None or None in curve for curve in curves):
        return None
    last, losses, times = curves
    steps = steps_to(smoothed(last)[max(1, round(at * len(last))) - 1] * (1 + within), losses)
    return None if steps is None else times[steps - 1]


def seconds_over_link(row: Row, other: Row, *, rate: str) -> list[float] | None:
    """When each step of a simulated training would end on a link of `rate`, such as 100mbit: a list, computed.

    A step takes its median seconds of computation, then the seconds of its bytes, without overlap and latency. Bytes of a
    warm-up are sent first.
    """
    bandwidth = parse_rate(rate)
    known: list[Any] = [
        row.get(name) for name in ("steps", "step_seconds.p50", "sent_bytes_per_step", "total_sent_bytes")
    ]
    if None in known:
        return None
    steps, seconds, sent, total = known
    sent_by = [max(0.0, total - (steps - step) * sent) for step in range(1, steps + 1)]
    return [step * seconds + sent / bandwidth for step, sent in enumerate(sent_by, start=1)]


KINDS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (speedup, ratio, time_to_loss, seconds_over_link)
}


def check_derivations(described: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError for what no derived column can have, with what it can."""
    for name, entry in described.items():
        kind = entry.get("kind", name)
        if kind not in KINDS:
            raise ValueError(f"derive.{name} has the unknown kind {kind!r}; there are: {', '.join(KINDS)}")
        try:
            _value(name, entry, {}, {})
        except TypeError as error:
            takes = ", ".join([*list(inspect.signature(KINDS[kind]).parameters)[2:], "against"])
            raise ValueError(f"derive.{name}: {error}; {kind} takes {takes}") from error


def derived(rows: Sequence[Row], described: Mapping[str, Any], dimensions: Sequence[str]) -> list[Row]:
    """The rows with the derived columns of a study file, each of which may use those before it.

    They are {name: {kind: one of KINDS, its options}}; the kind is its name if not given. With `against`, the other row is
    that with these values at the same place of the grid (`dimensions`), and without a row there the column is None.
    """
    found = [dict(row) for row in rows]
    for name, entry in described.items():
        others = [counterpart(row, found, dimensions, entry.get("against", {})) for row in found]
        for row, other in zip(found, others, strict=True):
            row[name] = None if other is None else _value(name, entry, row, other)
    return found


def _value(name: str, entry: Mapping[str, Any], row: Row, other: Row) -> Any:
    options = {key: value for key, value in entry.items() if key not in ("kind", "against")}
    return KINDS[entry.get("kind", name)](row, other, **options)


def counterpart(row: Row, rows: Sequence[Row], dimensions: Sequence[str], against: Mapping[str, Any]) -> Row | None:
    """The first row with the values `against` that is otherwise on the same place of the grid; the row where none are."""
    if not against:
        return row
    wanted = {name: row.get(name) for name in dimensions} | dict(against)
    alike = (other for other in rows if all(other.get(name) == value for name, value in wanted.items()))
    return next((other for other in alike if _same_data(row, other)), None)


def _same_data(row: Row, other: Row) -> bool:
    """Return True unless both rows name their data, and differently."""
    return None in (sources := (row.get(SOURCE), other.get(SOURCE))) or sources[0] == sources[1]


def _divided(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def means(rows: Sequence[Row], over: Sequence[str], dimensions: Sequence[str], lists: Sequence[str]) -> list[Row]:
    """One row for all that are alike in `dimensions` but for `over`.

    A number becomes its mean, with its sample standard deviation as NAME.spread where there are several; of the lists, those
    named are averaged element by element and the others left out. What any row lacks, the mean lacks.

    >>> means([{"seed": 0, "loss": 1.0}, {"seed": 1, "loss": 3.0}], ["seed"], ["seed"], [])
    [{'loss': 2.0, 'loss.spread': 1.4142135623730951, 'runs': 2}]
    """
    kept = [name for name in dimensions if name not in over]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(str(row.get(name)) for name in kept), []).append(row)
    return [_mean(members, [*over], kept, lists) for members in groups.values()]


def _mean(rows: Sequence[Row], over: Sequence[str], kept: Sequence[str], lists: Sequence[str]) -> Row:
    found: Row = {}
    for name in rows[0]:
        values = [row.get(name) for row in rows]
        if name in over or (isinstance(values[0], list) and name not in ("labels", *lists)):
            continue
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if len(numbers) == len(values) and name not in kept and len(set(numbers)) > 1:
            found |= {name: statistics.fmean(numbers), name + SPREAD: statistics.stdev(numbers)}
        else:
            found[name] = _agreed(values)
    return {**found, RUNS: len(rows)}


def _agreed(values: Sequence[Any]) -> Any:
    """Return the value that all rows have, a mean of lists, or None."""
    if all(value == values[0] for value in values):
        return values[0]
    if all(isinstance(value, list) for value in values) and all(len(value) == len(values[0]) for value in values):
        return [None if None in column else statistics.fmean(column) for column in zip(*values, strict=True)]
    return None
