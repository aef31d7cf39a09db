"""What was measured: rows, and the document that keeps them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ..results.files import environment, figures_document


@dataclass(frozen=True)
class Row:
    """A job on a backend. What is not right has no seconds, and `wrong` says what differs from the reference.

    Times are medians in seconds, with their quartiles. `fraction_of_copy`: the speed in floor bytes, relative to
    `copy_bytes_per_second`, the speed in bytes read and written of the copies between the repeats. `by_others`: of
    those operations of the job that the backend does not have, the backend that ran.
    """

    operation: str
    backend: str
    dtype: str
    elements: int
    threads: int
    correct: bool
    floor_bytes: int
    baseline: str
    seconds: float | None = None
    fraction_of_copy: float | None = None
    baseline_seconds: float | None = None
    quartile_seconds: tuple[float, float] | None = None
    repeats: int = 0
    copy_bytes_per_second: float | None = None
    by_others: Mapping[str, str] = field(default_factory=dict)
    wrong: str = ""


def copy_bytes_per_second(rows: Sequence[Row]) -> float | None:
    """The machine's speed in copies, on the most threads that were measured: the median of all rows."""
    most = max(row.threads for row in rows)
    speeds = [row.copy_bytes_per_second for row in rows if row.threads == most and row.copy_bytes_per_second]
    return median(speeds) if speeds else None


def document(config: Any, rows: Sequence[Row], machine: Mapping[str, Any]) -> dict[str, Any]:
    """All rows as the file has them."""
    found = figures_document("kernels", config, [dataclasses.asdict(row) for row in rows])
    return {**found, "environment": dict(machine), "copy_bytes_per_second": copy_bytes_per_second(rows)}


def machine(cache_bytes: int) -> dict[str, Any]:
    """Where the figures come from, and how many processes were running (the load of the last minute)."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {**environment(), "last_level_cache_bytes": cache_bytes, "load": load}
