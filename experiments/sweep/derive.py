"""Columns computed from others, and from rows to compare with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..network.link import parse_rate
from ..results.rows import Row
from ..results.statistics import smoothed, steps_to


class Derivation(ABC):
    """How a column is computed; None where a row lacks what it takes."""

    @property
    @abstractmethod
    def columns(self) -> list[str]:
        """What it takes."""

    @abstractmethod
    def value(self, row: Row, rows: Sequence[Row], dimensions: Sequence[str]) -> Any:
        """Of one row; `dimensions` are the columns of the grid, which a row to compare with shares."""


@dataclass(frozen=True)
class Speedup(Derivation):
    """How many times as small a column is as in the row with the values `against`: 2 is twice as fast."""

    of: str
    against: Mapping[str, Any]

    @property
    def columns(self) -> list[str]:
        return [self.of, *self.against]

    def value(self, row: Row, rows: Sequence[Row], dimensions: Sequence[str]) -> float | None:
        reference = counterpart(row, rows, dimensions, self.against)
        return _divided(reference.get(self.of), row.get(self.of)) if reference else None


@dataclass(frozen=True)
class Relative(Derivation):
    """How many times as large a column is as in the row with the values `against`; `percent`: by how much, in per cent."""

    of: str
    against: Mapping[str, Any]
    percent: bool = False

    @property
    def columns(self) -> list[str]:
        return [self.of, *self.against]

    def value(self, row: Row, rows: Sequence[Row], dimensions: Sequence[str]) -> float | None:
        reference = counterpart(row, rows, dimensions, self.against)
        found = _divided(row.get(self.of), reference.get(self.of)) if reference else None
        return found if found is None or not self.percent else 100 * (found - 1)


@dataclass(frozen=True)
class Quotient(Derivation):
    """One column over another, times `times`."""

    of: str
    over: str
    times: float = 1.0

    @property
    def columns(self) -> list[str]:
        return [self.of, self.over]

    def value(self, row: Row, rows: Sequence[Row], dimensions: Sequence[str]) -> float | None:
        found = _divided(row.get(self.of), row.get(self.over))
        return None if found is None else found * self.times


@dataclass(frozen=True)
class Last(Derivation):
    """The last number of a list, such as the seconds of all steps of `train_seconds`."""

    of: str

    @property
    def columns(self) -> list[str]:
        return [self.of]

    def value(self, row: Row, rows: Sequence[Row], dimensions: Sequence[str]) -> float | None:
        last: float | None = row[self.of][-1] if row.get(self.of) else None
        return last


@dataclass(frozen=True)
class TimeToLoss(Derivation):
    """Seconds of training until the smoothed loss is at most what the row with the values `against` ends with.

    `at`: or has after that share of its steps, so that who learns a little less from a step has some left to get there.
    `within`: the target lies that much above it, relative. None for a run that never gets there.
    """

    against: Mapping[str, Any]
    at: float = 1.0
    within: float = 0.0
    of: str = "loss"
    seconds: str = "train_seconds"

    def __post_init__(self) -> None:
        if not 0 < self.at <= 1:
            raise ValueError(f"at is a share of the steps, above 0 and up to 1; got {self.at}")

    @property
    def columns(self) -> list[str]:
        return [self.of, self.seconds, *self.against]

    def value(self, row: Row, rows: Sequence[Row], dimensions: Sequence[str]) -> float | None:
        reference = counterpart(row, rows, dimensions, self.against)
        curves: list[Any] = [(reference or {}).get(self.of), row.get(self.of), row.get(self.seconds)]
        if any(curve is None or None in curve for curve in curves):
            return None
        last, losses, times = curves
        target = smoothed(last)[max(1, round(self.at * len(last))) - 1] * (1 + self.within)
        steps = steps_to(target, losses)
        return None if steps is None else times[steps - 1]


@dataclass(frozen=True)
class SecondsOverLink(Derivation):
    """When each step of a simulated training would end on a link of `rate`, such as 100mbit: a list, computed.

    A step takes its median seconds of computation, then the seconds of its bytes, without overlap and latency. Bytes of a
    warm-up are sent first.
    """

    rate: str

    def __post_init__(self) -> None:
        parse_rate(self.rate)

    @property
    def columns(self) -> list[str]:
        return ["steps", "step_seconds.p50", "sent_bytes_per_step", "total_sent_bytes"]

    def value(self, row: Row, rows: Sequence[Row], dimensions: Sequence[str]) -> list[float] | None:
        if any(row.get(name) is None for name in self.columns):
            return None
        steps, seconds, sent, total = (row[name] for name in self.columns)
        sent_by = [max(0.0, total - (steps - step) * sent) for step in range(1, steps + 1)]
        return [step * seconds + sent / parse_rate(self.rate) for step, sent in enumerate(sent_by, start=1)]


KINDS: dict[str, type[Derivation]] = {
    "speedup": Speedup,
    "relative": Relative,
    "quotient": Quotient,
    "last": Last,
    "time_to_loss": TimeToLoss,
    "seconds_over_link": SecondsOverLink,
}


def derivations(described: Mapping[str, Any]) -> dict[str, Derivation]:
    """The derived columns of a study file: {name: {kind: one of KINDS, its fields}}; the kind is its name if not given.

    Raises ValueError for unknown kinds and fields, with those there are.
    """
    return {name: _derivation(name, dict(entry)) for name, entry in described.items()}


def _derivation(name: str, entry: dict[str, Any]) -> Derivation:
    kind = entry.pop("kind", name)
    if kind not in KINDS:
        raise ValueError(f"derive.{name} has the unknown kind {kind!r}; there are: {', '.join(KINDS)}")
    try:
        return KINDS[kind](**entry)
    except TypeError as error:
        names = ", ".join(field.name for field in fields(KINDS[kind]))  # type: ignore[arg-type]
        raise ValueError(f"derive.{name}: {error}; {kind} takes {names}") from error


def derived(rows: Sequence[Row], described: Mapping[str, Any], dimensions: Sequence[str]) -> list[Row]:
    """The rows with their derived columns, each of which may use those before it."""
    found = [dict(row) for row in rows]
    for name, derivation in derivations(described).items():
        values = [derivation.value(row, found, dimensions) for row in found]
        for row, value in zip(found, values, strict=True):
            row[name] = value
    return found


def counterpart(row: Row, rows: Sequence[Row], dimensions: Sequence[str], against: Mapping[str, Any]) -> Row | None:
    """The first row with the values `against` that is otherwise on the same place of the grid."""
    same = [name for name in dimensions if name not in against]
    wanted = {name: row.get(name) for name in same} | dict(against)
    return next((other for other in rows if all(other.get(name) == value for name, value in wanted.items())), None)


def _divided(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None
