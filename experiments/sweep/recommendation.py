"""Whether compression pays, in a sentence for each setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..results.recommendation import UNCOMPRESSED, WORTHWHILE
from ..results.rows import Row
from .rows import named

COMPRESSOR = "compressor"


@dataclass(frozen=True)
class Criterion:
    """What decides. `of`: a column, less is better; `each`: one sentence for every combination of these columns."""

    of: str
    each: list[str] = field(default_factory=list)
    what: str = "a step"
    """name of the timed activity"""
    named: list[str] = field(default_factory=lambda: [COMPRESSOR])
    """columns that name a compressor, such as [compressor, local_every]; a number of 0 is left out"""

    @property
    def columns(self) -> list[str]:
        """What it takes of a row."""
        return [self.of, *self.each, *self.named, COMPRESSOR]


def criterion_of(described: Mapping[str, Any]) -> Criterion | None:
    """From a study file. Raises ValueError for unknown keys."""
    try:
        return Criterion(**described) if described else None
    except TypeError as error:
        raise ValueError(f"verdict: {error}; it has {', '.join(each.name for each in fields(Criterion))}") from error


def recommendations(criterion: Criterion, rows: Sequence[Row]) -> Iterator[str]:
    """One sentence for each setting, in the order of the rows."""
    settings = list(dict.fromkeys(tuple(row.get(name) for name in criterion.each) for row in rows))
    for setting in settings:
        alike = [row for row in rows if tuple(row.get(name) for name in criterion.each) == setting]
        shown = ("unlimited" if value in (None, "0") else str(value) for value in setting)
        where = ", ".join(map(" ".join, zip(criterion.each, shown, strict=True)))
        yield f"{where or 'Here'}: {_sentence(criterion, alike)}"


def _sentence(criterion: Criterion, rows: Sequence[Row]) -> str:
    timed = sorted((row for row in rows if row.get(criterion.of) is not None), key=lambda row: row[criterion.of])
    plain = [row for row in timed if row[COMPRESSOR] in UNCOMPRESSED]
    others = [row for row in timed if row[COMPRESSOR] not in UNCOMPRESSED]
    if not plain or len(rows) == len(plain):
        return f"no verdict, it takes {criterion.what} of none, bf16 or fp16 and of another compressor."
    best = plain[0]
    if not others:
        return f"do not compress here beyond {best[COMPRESSOR]}: no other compressor gets there at all."
    other = ", ".join(named(column, others[0][column]) for column in criterion.named if others[0].get(column))
    usual, seconds = best[criterion.of], others[0][criterion.of]
    if usual / seconds < WORTHWHILE:
        return (
            f"do not compress here beyond {best[COMPRESSOR]}: {criterion.what} takes it {usual:.3g} s, and the best other "
            f"compressor, {other}, {seconds:.3g} s."
        )
    return (
        f"{other} has a speed-up of {usual / seconds:.1f}x over {best[COMPRESSOR]}: {criterion.what} takes "
        f"{seconds:.3g} s, not {usual:.3g} s."
    )
