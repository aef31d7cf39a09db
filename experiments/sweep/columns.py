"""Columns computed from others and from rows to compare with; rows that differ in their seed as one row of means."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..network.link import parse_rate
from ..results.rows import Row
from ..results.statistics import NEAR, NEVER, interval, smoothed, steps_to, steps_with_loss_of

RUNS = "runs"  # the column with the number of rows of a mean
SPREAD = ".spread"  # behind the name of a column: the standard deviation of a mean's numbers
INTERVAL = ".interval"  # and half the width of its 95 % interval
SOURCE = "data.source"  # the column of the data; rows of other data, such as packages of another day, are not compared


def speedup(row: Row, other: Row, *, of: str) -> float | None:
    """Return the column of the other row over this row's: 2 is twice as fast."""
    return _divided(other.get(of), row.get(of))


def ratio(row: Row, other: Row, *, of: str, over: str | None = None, percent: bool = False) -> float | None:
    """A column over that of the other row, or over another column; `percent`: by how many per cent it is larger."""
    found = _divided(row.get(of), other.get(over or of))
    return 100 * (found - 1) if percent and found is not None else found


def matching(rows: Sequence[Row], where: Mapping[str, Any]) -> list[Row]:
    """Return the rows with these values, or one of a list of them."""
    wanted = {name: value if isinstance(value, list) else [value] for name, value in where.items()}
    return [row for row in rows if all(row.get(name) in values for name, values in wanted.items())]


def looked_up(row: Row, other: Row, *, of: str) -> Any:
    """Return the column of the other row."""
    return other.get(of)


def last(row: Row, other: Row, *, of: str) -> Any:
    """Return the last value of a list."""
    values = row.get(of)
    return values[-1] if values else None


def time_to_loss(row: Row, other: Row, *, within: float = NEAR, seconds: str = "train_seconds") -> float | str | None:
    """Seconds of training until the smoothed loss is at most what the other row ends with, or `NEVER`.

    `within`: the target lies that much above it, relative. None where a row lacks its loss or seconds.
    """
    curves: list[Any] = [other.get("loss"), row.get("loss"), row.get(seconds)]
    if any(curve is None for curve in curves) or None in curves[0]:
        return None
    last, losses, times = curves
    finite = losses[: losses.index(None)] if None in losses else losses
    steps = steps_to(smoothed(last)[-1] * (1 + within), finite)
    return NEVER if steps is None else times[steps - 1]


def as_after(row: Row, other: Row) -> int | None:
    """Return after how many of its steps the other row stays at the smoothed loss that this row ends with; all, if never."""
    mine, theirs = row.get("loss"), other.get("loss")
    return None if not mine or not theirs or None in mine or None in theirs else steps_with_loss_of(theirs, mine)


def seconds_of_steps(row: Row, other: Row) -> list[float] | None:
    """When each step of a simulated training would end if it took as long as that of the other row: a list.

    Steps that the other row lacks take the mean of its second half.
    """
    steps, ends = row.get("steps"), other.get("train_seconds")
    if steps is None or not ends or len(ends) < 2:
        return None
    half = len(ends) // 2
    each = (ends[-1] - ends[half - 1]) / (len(ends) - half)
    return [*ends[:steps], *(ends[-1] + each * more for more in range(1, steps - len(ends) + 1))]


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


def without_suffix(name: str) -> str:
    """Return the column that a mean's column is about."""
    return name.removesuffix(SPREAD).removesuffix(INTERVAL)


KINDS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (speedup, ratio, looked_up, last, time_to_loss, as_after, seconds_over_link, seconds_of_steps)
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
    """The first row with the values `against`, or one of a list of them, that is otherwise on the same place of the grid.

    It is the row itself where no values are given.
    """
    if not against:
        return row
    alike = matching(rows, {name: row.get(name) for name in dimensions} | dict(against))
    return next((other for other in alike if _same_data(row, other)), None)


def _same_data(row: Row, other: Row) -> bool:
    """Return True unless both rows name their data, and differently."""
    return None in (sources := (row.get(SOURCE), other.get(SOURCE))) or sources[0] == sources[1]


def _divided(numerator: float | str | None, denominator: float | str | None) -> float | None:
    if NEVER in (numerator, denominator) or numerator is None or not denominator:
        return None
    return float(numerator) / float(denominator)


def means(rows: Sequence[Row], over: Sequence[str], dimensions: Sequence[str], lists: Sequence[str]) -> list[Row]:
    """One row for all that are alike in `dimensions` but for `over`.

    A number becomes its mean, with its sample standard deviation as NAME.spread and half the width of its 95 % interval as
    NAME.interval where there are several; of the lists, those named are averaged element by element and the others left
    out. What any row lacks, the mean lacks, and what one never reaches, the mean never does.

    >>> means([{"seed": 0, "loss": 1.0}, {"seed": 1, "loss": 3.0}], ["seed"], ["seed"], [])
    [{'loss': 2.0, 'loss.spread': 1.4142135623730951, 'loss.interval': 12.706, 'runs': 2}]
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
            found[name + INTERVAL] = interval(numbers)
        else:
            found[name] = _agreed(values)
    return {**found, RUNS: len(rows)}


def _agreed(values: Sequence[Any]) -> Any:
    """Return the value that all rows have, a mean of lists, or None."""
    if NEVER in values:
        return NEVER
    if all(value == values[0] for value in values):
        return values[0]
    if all(isinstance(value, list) for value in values) and all(len(value) == len(values[0]) for value in values):
        return [None if None in column else statistics.fmean(column) for column in zip(*values, strict=True)]
    return None
