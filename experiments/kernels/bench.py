"""The measurement: each case at each size, dtype and number of threads, on all backends that have it, within a limit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ...kernels.dispatch import REFERENCE
from ..results.files import environment
from .cases import DTYPES, Case
from .check import Checked, check, first, kept, outcome
from .heavy_tail import HeavyTail
from .job import Job, Output
from .race import ColdClock, Racer, Timing, race, torch_threads

BASELINE, COPY = "torch's operators", "copy"  # racers beside the backends
COPIED = 2  # times the last-level cache: the least that a copy reads


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
    """The host's speed in copies, on the most threads that were measured: the median of all rows."""
    most = max(row.threads for row in rows)
    speeds = [row.copy_bytes_per_second for row in rows if row.threads == most and row.copy_bytes_per_second]
    return median(speeds) if speeds else None


@dataclass(frozen=True)
class Group:
    """A case at one size and dtype, measured together on all its backends and numbers of threads."""

    case: Case
    elements: int
    dtype: str
    threads: tuple[int, ...]
    backends: tuple[str, ...]


@dataclass
class Bench:
    """A device, the patience for it, and what all groups share. `skipped`: what was not measured, and why."""

    device: torch.device
    repeats: int
    seconds: float
    largest: int  # elements
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = ColdClock(self.device)
        about = {"last_level_cache_bytes": self.clock.cache_bytes, "load": os.getloadavg()[0]}  # of the last minute
        self.machine = {**environment(), **about}
        self._numbers = HeavyTail(self.largest, self.device)
        size = max(4 * self.largest, COPIED * self.clock.cache_bytes)
        self._source, self._target = torch.ones(2, size, dtype=torch.uint8, device=self.device)
        self._numbers.fill(self._source)

    def measure(self, group: Group) -> Iterator[list[Row]]:
        """The rows of each number of threads in turn."""
        try:
            job = group.case.make(group.elements, DTYPES[group.dtype], self.device)
            expected = kept(outcome(job, self._numbers, REFERENCE))
            for threads in group.threads:
                with torch_threads(threads):
                    rows = self._rows(group, threads, job, expected)
                yield rows
        except torch.OutOfMemoryError as error:
            self.skipped.append(f"{group.case.name} of {group.elements:,} elements: {str(error).partition('.')[0]}")

    def _rows(self, group: Group, threads: int, job: Job, expected: list[Output]) -> list[Row]:
        checked = {name: check(group.case, job, self._numbers, name, expected) for name in group.backends}
        own = {name: result for name, result in checked.items() if self._does_part(group, name, result)}
        right = [name for name, result in own.items() if not result.wrong]
        timings = self._race(group, job, right) if right else {}
        return [self._row(group, threads, job, name, result, timings) for name, result in own.items()]

    def _does_part(self, group: Group, backend: str, result: Checked) -> bool:
        """Return True if a backend does any part of a job itself, or does it wrong."""
        if result.wrong or set(result.by_others) != set(group.case.uses):
            return True
        others = ", ".join(sorted(set(result.by_others.values())))
        line = f"{group.case.name} on {backend} for {group.dtype}: {others} would run"
        if line not in self.skipped:
            self.skipped.append(line)
        return False

    def _race(self, group: Group, job: Job, backends: Sequence[str]) -> dict[str, Timing]:
        refill = partial(job.refill, self._numbers)
        racers = {name: Racer(job.run, first(name, self.device.type), refill) for name in backends}
        racers[BASELINE] = Racer(job.run_baseline, (REFERENCE,), refill, cold=True)
        source, target = self._copied(group)
        racers[COPY] = Racer(partial(target.copy_, source), (REFERENCE,), cold=True)
        return race(racers, self.clock, self.repeats, self.seconds)

    def _copied(self, group: Group) -> tuple[Tensor, Tensor]:
        """Return source and target of the copy: as many elements as the group has, or more if the cache could hold them."""
        dtype = DTYPES[group.dtype]
        elements = max(group.elements, COPIED * self.clock.cache_bytes // dtype.itemsize)
        return self._source.view(dtype)[:elements], self._target.view(dtype)[:elements]

    def _row(
        self, group: Group, threads: int, job: Job, backend: str, result: Checked, timings: dict[str, Timing]
    ) -> Row:
        times = {} if result.wrong else self._times(group, job, timings[backend], timings)
        return Row(
            operation=group.case.name,
            backend=backend,
            dtype=group.dtype,
            elements=group.elements,
            threads=threads,
            correct=not result.wrong,
            floor_bytes=round(job.floor_bytes),
            baseline=job.baseline,
            by_others=dict(result.by_others),
            wrong=result.wrong,
            **times,
        )

    def _times(self, group: Group, job: Job, own: Timing, timings: dict[str, Timing]) -> dict[str, Any]:
        copied = 2 * self._copied(group)[0].nbytes / timings[COPY].median  # bytes read and written a second
        return {
            "seconds": own.median,
            "fraction_of_copy": round(job.floor_bytes) / own.median / copied,
            "baseline_seconds": timings[BASELINE].median,
            "quartile_seconds": own.quartiles,
            "repeats": own.repeats,
            "copy_bytes_per_second": copied,
        }


class Limit:
    """Admits groups until `seconds` after its creation are over, or would be by what the same job took before."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.left_out = seconds, list[Group]()
        self._clock, self._began = clock, clock()
        self._per_element: dict[str, float] = {}

    def admit(self, groups: Sequence[Group]) -> Iterator[Group]:
        """Yield the groups that fit; the others are `left_out`. The caller measures each before it asks for the next."""
        for group in groups:
            began = self._clock()
            expected = self._per_element.get(group.case.name, 0.0) * group.elements
            if began + expected - self._began > self.seconds:
                self.left_out.append(group)
                continue
            yield group
            self._per_element[group.case.name] = (self._clock() - began) / group.elements

    def told(self) -> list[str]:
        """Return what was left out, a line for each size and dtype, with the way to measure it."""
        why = f"the limit of {self.seconds:g} s was reached (--all lifts it, --limit N sets it)"
        return [
            f"{why}: {elements:,} elements of {dtype}: {', '.join(each.case.name for each in alike)}"
            for (elements, dtype), alike in groupby(self.left_out, lambda group: (group.elements, group.dtype))
        ]
