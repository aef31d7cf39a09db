"""`handle.watch(every=100)`: now and then what a training's steps cost."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ...compress.whole_number import whole_number
from ..averaging.averager import CompressedAverager
from ..averaging.sharded import ShardAverager
from ..measure.metrics import metrics
from ..measure.stats import RECENT, Stats
from .dense_step import dense_step_seconds
from .folder import FolderOfRanks
from .report import Report
from .sinks import Sink, sink_of

logger = logging.getLogger(__name__)
MARGIN = 0.95  # of the measured step: a dense one that is predicted to be shorter is worth a word
IN_A_ROW = 3  # reports that say so


class Watch:
    """Tells of every `every`th step, when the one after it begins, until it is closed; `with` closes it, too.

    Made by `handle.watch`. Who raises an error is told no more, with one message in the log; no training ends by it.
    """

    def __init__(self, handle: Observed, every: int, sinks: list[Sink]) -> None:
        self._handle, self._every, self._sinks = handle, every, sinks
        self._advised, self._slower = "", 0
        self._watchers = handle.averager.totals.watchers
        self._watchers.append(self)

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
        measured, what = self._handle.averager.measured(), self._handle._what()
        found, dense = metrics(measured, RECENT), dense_step_seconds(measured)
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
            f"a dense step would be faster now: about {dense * 1e3:.1f} ms, by a replay of the last steps, against "
            f"{now * 1e3:.1f} ms with {what}. Try handle.swap('none') on all ranks, or a method with less arithmetic"
        )

    def close(self) -> None:
        """Tell no more. It may be called twice, and while a report is told."""
        if self in self._watchers:
            self._watchers.remove(self)
        for sink in self._sinks:
            if isinstance(sink, FolderOfRanks):
                sink.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Observed:
    """A handle, as far as it tells what its steps cost. `averager`: what it is the handle of."""

    averager: CompressedAverager | ShardAverager

    def _what(self) -> str:
        """What travels, in a specification's words."""
        raise NotImplementedError

    def stats(self) -> Stats:
        """Rounds, bytes and seconds of the last synced step, by bucket, and in total."""
        return self.averager.stats()

    def metrics(self) -> dict[str, float]:
        """The same and more as flat names and numbers, for `wandb.log(handle.metrics())`: see docs/watch.md.

        Of the last synced step; steps, and bytes in total, since the beginning. Never waits for a GPU.
        """
        return metrics(self.averager.measured())

    def watch(self, every: int = 100, to: Any = "console", *, folder: str | Path | None = None) -> Watch:
        """Tell what a step costs, after every `every` steps, until what it returns, or the handle, is closed.

        `to`: "console", a rich Console or a logging.Logger, for a line of text; a run of wandb or a SummaryWriter of
        TensorBoard, for numbers; or any callable of (metrics, step), which must not communicate. On rank 0 only. `folder`:
        where rank 0 keeps a file of each rank for `gradwire top`; all ranks give it. Figures are means over the last 8
        steps. No bit of the training changes. Raises ValueError and TypeError for arguments that tell nobody.
        """
        every = whole_number(every, "every is a number of steps, at least 1")
        group = self.averager.engines.group
        first = group.rank() == 0
        if to is None and folder is None and first:
            raise ValueError("watch(to=None) tells nobody: give to=..., or folder=... for `gradwire top`")
        spoken = [] if to is None else [sink_of(to)]
        sinks = spoken if first else []
        if folder is not None:
            sinks = [*sinks, FolderOfRanks(folder, group, every)]
        return Watch(self, every, sinks)

    def __repr__(self) -> str:
        name, what = type(self).__name__, self._what()
        try:
            rank, ranks = self.averager.engines.place()
        except RuntimeError:
            return f"<{name}: {what}, no process group yet>"
        measured = self.averager.measured()
        numbers = metrics(measured)
        parts = [what, f"rank {rank} of {ranks}", f"{numbers['steps']} steps, {numbers['steps_here']} of them here"]
        parts += [f"{numbers['ratio']:.4g}x fewer bytes"] if "ratio" in numbers else []
        parts += [] if measured.warm_up is None else [str(measured.warm_up)]
        return f"<{name}: {', '.join(parts)}>"
