"""`handle.watch(every=100)`: now and then what a training's steps cost. `report.py` has the line."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...compress.builder.spelling import whole_number
from ..averaging.averager import CompressedAverager
from ..averaging.shard_averager import ShardAverager
from ..measure.clock import Clock
from ..measure.stats import RECENT
from ..measure.step import Step
from .advice import Adviser
from .dense_step import dense_step_seconds
from .report import Report
from .report_folder import FolderOfRanks
from .sinks import Sink, sink_of

logger = logging.getLogger(__name__)


class Watched(Protocol):
    """The part of a handle that a watch asks."""

    @property
    def reported(self) -> CompressedAverager | ShardAverager: ...

    def _metrics(self, most: int = 1, seen: Step | None = None) -> dict[str, float]: ...

    def _what(self) -> str: ...


@dataclass(frozen=True)
class Due:
    """A report to come: of step `number`, by a compressor. `marked`: the step, if a GPU's clock takes its marks."""

    number: int
    compressor: str
    marked: Step | None = None

    def reached(self, clock: Clock) -> bool:
        """Return True if the GPU is past the step."""
        return self.marked is None or all(map(clock.reached, self.marked.marks))


class Watch:
    """Reports every `every`th step, when a later one begins, until it is closed; `with` closes it, too.

    A GPU may still be busy with the step when the next one begins. So its clock marks the steps that are reported, and a
    report waits until a step begins with the GPU past the marks. Nothing else waits.

    Made by `handle.watch`. A sink that raises gets no more reports. No training ends by a report.
    """

    def __init__(self, handle: Watched, every: int, sinks: list[Sink]) -> None:
        self._handle, self._every, self._sinks = handle, every, sinks
        self._adviser = Adviser()
        self._next: Due | None = None  # of the step under way
        self._due: deque[Due] = deque()
        self._watchers = handle.reported.totals.watchers
        self._watchers.append(self)

    def step_begins(self, step: Step, ended: int) -> None:
        """Report what is due, after `ended` steps, and prepare the report of the step that begins, if it gets one."""
        if not self._sinks:
            return
        if ended and ended % self._every == 0:
            self._due.append(self._next or Due(ended, self._handle._what()))
        self._next, clock = None, self._handle.reported.engines.clock
        try:
            while self._due and self._due[0].reached(clock):
                report = self._report(self._due.popleft(), clock)
                for sink in tuple(self._sinks):
                    self._tell(sink, report)
        except Exception:
            self._due.clear()
            logger.exception("training continues without the reports that were due")
        if (ended + 1) % self._every == 0:
            self._next = Due(ended + 1, self._handle._what(), None if clock.at_once else step)
            if not clock.at_once and step.now is time.perf_counter:
                step.now = clock.now

    def _tell(self, sink: Sink, report: Report) -> None:
        try:
            sink(report)
        except Exception:
            logger.exception("training continues, and the receiver that raised this gets no more reports")
            self._sinks.remove(sink)

    def _report(self, due: Due, clock: Clock) -> Report:
        measured, what = self._handle.reported.measured(), due.compressor
        seen = None if due.marked is None else due.marked.read(clock)
        found, dense = self._handle._metrics(RECENT, seen), dense_step_seconds(measured)
        if dense is not None:
            found["dense_step_seconds"] = dense
        found["steps"] = due.number
        return Report(due.number, what, found, self._adviser.advice(what, found), measured.warm_up)

    def close(self) -> None:
        """End the reports. You may call it twice, and from a report."""
        if self in self._watchers:
            self._watchers.remove(self)
        self._due.clear()
        for sink in self._sinks:
            if isinstance(sink, FolderOfRanks):
                sink.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def watch(handle: Watched, every: int, to: Any, folder: str | Path | None) -> Watch:
    """Report what steps cost until the watch is closed: see `Handle.watch`."""
    every = whole_number(every, "every is a number of steps, at least 1")
    engines = handle.reported.engines
    group, first = engines.group, engines.first
    if to is None and folder is None and first:
        raise ValueError("watch(to=None) reports to nobody: pass to=..., or folder=... for `gradwire top`")
    spoken = [] if to is None else [sink_of(to)]
    sinks = spoken if first else []
    if folder is not None:
        sinks = [*sinks, FolderOfRanks(folder, group, every)]
    return Watch(handle, every, sinks)
