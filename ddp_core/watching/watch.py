"""`handle.watch(every=100)`: now and then what a training's steps cost."""

from __future__ import annotations

import logging
import time
from collections import deque
from pathlib import Path
from typing import Any, Protocol

from ...compress.builder.options import whole_number
from ..averaging.averager import CompressedAverager
from ..averaging.shard_averager import ShardAverager
from ..measure.stats import RECENT, metrics
from ..measure.step import Step
from .dense_step import dense_step_seconds
from .report import Report
from .report_folder import FolderOfRanks
from .sinks import Sink, sink_of

logger = logging.getLogger(__name__)
MARGIN = 0.95  # of the measured step: a dense one that is predicted to be shorter is worth a word
IN_A_ROW = 3  # reports that say so


class Watched(Protocol):
    """The part of a handle that a watch asks."""

    averager: CompressedAverager | ShardAverager

    def _what(self) -> str: ...


class Watch:
    """Tells of every `every`th step, when the one after it begins, until it is closed; `with` closes it, too.

    A GPU may not be there yet when the next step begins. So the steps to tell of have their marks taken by its clock, and
    are told of when a step begins at which it is past them: nothing waits for it.

    Made by `handle.watch`. Who raises an error is told no more, with one message in the log; no training ends by it.
    """

    def __init__(self, handle: Watched, every: int, sinks: list[Sink]) -> None:
        self._handle, self._every, self._sinks = handle, every, sinks
        self._advised, self._slower = "", 0
        self._marked: Step | None = None  # the step under way, if it is to be told of and a GPU's clock takes its marks
        self._due: deque[tuple[int, Step | None]] = deque()  # to be told of: how many steps had ended, and `_marked`
        self._watchers = handle.averager.totals.watchers
        self._watchers.append(self)

    def step_begins(self, step: Step, ended: int) -> None:
        """Tell of what is due, after `ended` steps, and have a step marked that will be."""
        if not self._sinks:
            return
        if ended and ended % self._every == 0:
            self._due.append((ended, self._marked))
        clock, self._marked = self._handle.averager.engines.clock, None
        while self._due and (self._due[0][1] is None or all(map(clock.reached, self._due[0][1].marks))):
            number, marked = self._due.popleft()
            report = self._report(number, None if marked is None else marked.read(clock))
            for sink in tuple(self._sinks):
                self._tell(sink, report)
        if not clock.at_once and (ended + 1) % self._every == 0:
            self._marked = step
            if step.now is time.perf_counter:
                step.now = clock.now

    def _tell(self, sink: Sink, report: Report) -> None:
        try:
            sink(report)
        except Exception:
            logger.exception("training continues, and the receiver that raised this gets no more reports")
            self._sinks.remove(sink)

    def _report(self, step: int, seen: Step | None) -> Report:
        measured, what = self._handle.averager.measured(), self._handle._what()
        found, dense = metrics(measured, RECENT, seen), dense_step_seconds(measured)
        advice = None
        if dense is not None:
            found["dense_step_seconds"] = dense
            advice = self._advice(what, found["step_seconds"], dense)
        return Report(step, what, found, advice, measured.warm_up)

    def _advice(self, what: str, now: float, dense: float) -> str | None:
        """A warning, once a compressor, where several reports in a row agree."""
        self._slower = self._slower + 1 if dense < MARGIN * now else 0
        if self._slower < IN_A_ROW or self._advised == what:
            return None
        self._advised = what
        return (
            f"an uncompressed step would be faster now: about {dense * 1e3:.1f} ms, by a replay of the last steps, against "
            f"{now * 1e3:.1f} ms with {what}. Try handle.swap('none') on all ranks, or a compressor with less arithmetic"
        )

    def close(self) -> None:
        """End the reports. You may call it twice, and from a report."""
        if self in self._watchers:
            self._watchers.remove(self)
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
    group = handle.averager.engines.group
    first = group.rank() == 0
    if to is None and folder is None and first:
        raise ValueError("watch(to=None) reports to nobody: pass to=..., or folder=... for `gradwire top`")
    spoken = [] if to is None else [sink_of(to)]
    sinks = spoken if first else []
    if folder is not None:
        sinks = [*sinks, FolderOfRanks(folder, group, every)]
    return Watch(handle, every, sinks)
