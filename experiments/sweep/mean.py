"""Rows that differ in their seed as one row: means, and how far they spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ..results.rows import Row

RUNS = "runs"  # the column that tells how many rows a mean is of
SPREAD = ".spread"  # behind the name of a column: how far the numbers of a mean spread


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
    """What all rows have, a mean of lists, or nothing."""
    if all(value == values[0] for value in values):
        return values[0]
    if all(isinstance(value, list) for value in values) and all(len(value) == len(values[0]) for value in values):
        return [None if None in column else statistics.fmean(column) for column in zip(*values, strict=True)]
    return None
