"""The columns that a study names, against those that there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..results.rows import Row
from .config import SweepConfig
from .derive import derivations
from .mean import RUNS, spread_of
from .rows import SOMETIMES, column_of


def check_columns(config: SweepConfig, rows: Sequence[Row]) -> None:
    """Raise ValueError for columns that the study names and neither these rows nor `derive` have, with those they have.

    Columns that only some points have are never refused; without rows nothing is.
    """
    if not rows:
        return
    there = list(dict.fromkeys(column for row in rows for column in row))
    if unknown := list(_unknown(config, {*there, *SOMETIMES.get(config.command, ())}, rows[0])):
        raise ValueError(
            f"the points have finished without columns that the study names: {', '.join(unknown)}; there are: "
            f"{', '.join([*there, *config.derive])}. Mend the study and run it again: what has finished is kept"
        )


def _unknown(config: SweepConfig, known: set[str], row: Row) -> Iterator[str]:
    """Each with the place that names it; a derived column may take those derived before it."""
    for name, derivation in derivations(config.derive).items():
        yield from _absent(derivation.columns, known, f"derive.{name}")
        known = {*known, name}
    if config.mean_over:
        known = {*known, RUNS, *(spread_of(name) for name in known)}
    yield from _absent([column_of(name, row) for name in config.columns], known, "columns")
    for figure in config.drawn:
        yield from _absent(figure.named, known, f"figure {figure.name}")
    if config.criterion:
        yield from _absent(config.criterion.columns, known, "verdict")


def _absent(columns: Sequence[str], known: set[str], where: str) -> Iterator[str]:
    return (f"{column} ({where})" for column in dict.fromkeys(columns) if column not in known)
