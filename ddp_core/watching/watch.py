"""`handle.watch(every=100)`: now and then what a training's steps cost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...compress.whole_number import whole_number
from ..measure.metrics import Measured, metrics
from ..measure.stats import RECENT, Totals
from .dense_step import dense_step_seconds
from .folder import FolderOfRanks
from .report import Report
from .sinks import Sink, sink_of

logger = logging.getLogger(__name__)
MARGIN = 0.95  # of the measured step: a dense one that is predicted to be shorter is worth a word
IN_A_ROW = 3  # reports that say so


@dataclass(frozen=True)
class Watched:
    """What averages, as far as watching it goes. `what` travels, in a specification's words; among whom, `group`."""

    totals: Totals
    measured: Callable[[], Measured]
    what: Callable[[], str]
    group: dist.ProcessGroup


class Watch:
    """Tells of every `every`th step, when the one after it begins, until it is closed; `with` closes it, too.

    Made by `handle.watch`. Who raises an error is told no more, with one message in the log; no training ends by it.
    """

    def __init__(self, watched: Watched, every: int, sinks: list[Sink]) -> None:
        self._watched, self._every, self._sinks = watched, every, sinks
        self._advised, self._slower = "", 0
        watched.totals.watchers.append(self)

    def step_ended(self, number: int) -> None:
        """So many steps have."""
        if number and number % self._every == 0 and self._sinks:
            report = self._report(number)
            for sink in tuple(self._sinks):
                self._tell(sink, report)

    def _tell(self, sink: Sink, report: Report) -> None:
        try:
            sink(report)
        except Exception:
            logger.exception("training goes on, and what raised this is told no more of its steps")
            self._sinks.remove(sink)

    def _report(self, step: int) -> Report:
        measured, what = self._watched.measured(), self._watched.what()
        found, dense = metrics(measured, RECENT), dense_step_seconds(measured)
        advice = None
        if dense is not None:
            found["dense_step_seconds"] = dense
            advice = self._advice(what, found["step_seconds"], dense)
        return Report(step, what, found, advice)

    def _advice(self, what: str, now: float, dense: float) -> str | None:
        """A warning, once a compressor, where several reports in a row agree."""
        self._slower = self._slower + 1 if dense < MARGIN * now else 0
        if self._slower < IN_A_ROW or self._advised == what:
            return None
        self._advised = what
        return (
            f"a dense step would be faster now: about {dense * 1e3:.1f} ms, by a replay of the last steps, against "
            f"{now * 1e3:.1f} ms with {what}. Try handle.swap('none') on all ranks, or a method with less arithmetic"
        )

    def close(self) -> None:
        """Tell no more. It may be called twice, and while a report is told."""
        if self in self._watched.totals.watchers:
            self._watched.totals.watchers.remove(self)
        for sink in self._sinks:
            if isinstance(sink, FolderOfRanks):
                sink.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def watch(watched: Watched, every: int, to: Any, folder: str | Path | None) -> Watch:
    """Begin to watch on this rank; see `Handle.watch`."""
    every = whole_number(every, "every is a number of steps, at least 1")
    if to is None and folder is None and watched.group.rank() == 0:
        raise ValueError("watch(to=None) tells nobody: give to=..., or folder=... for `gradwire top`")
    spoken = [] if to is None else [sink_of(to)]
    sinks = spoken if watched.group.rank() == 0 else []
    if folder is not None:
        sinks = [*sinks, FolderOfRanks(folder, watched.group, every)]
    return Watch(watched, every, sinks)
