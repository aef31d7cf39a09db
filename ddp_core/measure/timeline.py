"""The parts of each step's seconds, and traces of steps for a timeline viewer, in the trace event format."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .step import BucketStats, Step

MICROSECOND = 1e-6
DIGITS = 3  # of microseconds in a trace: viewers count nanoseconds
COMPUTATION = 0  # the row of a trace; buckets have those below


@dataclass(frozen=True)
class BucketTimes:
    """One bucket of a step, in seconds since its forward began. On CUDA, `done` and `spans` show when work was queued.

    Attributes:
        index: the bucket's place in the order of buckets. A step may leave buckets out.
        parameters: names of the bucket's parameters.
        ready: the last gradient was ready.
        launched: the bucket went to its compressor, after all earlier buckets.
        done: the average was there.
        spans: (encode, wait or decode; begin; end) of its program; empty with a hook that is not gradwire's.
    """

    index: int
    parameters: tuple[str, ...]
    ready: float
    launched: float
    done: float
    spans: tuple[tuple[str, float, float], ...] = ()


@dataclass(frozen=True)
class StepTimes:
    """The seconds of a synchronized step, by the host's clock. On CUDA they show when work was queued.

    Attributes:
        step: the number of the step, from 1.
        began: the time, by time.perf_counter, at which forward began.
        forward: the module's last forward before backward.
        backward: from the end of forward to the last gradient, the loss included.
        exposed: communication that no computation hid: from the last gradient until backward could return.
        buckets: the buckets that were sent, in order.
    """

    step: int
    began: float
    forward: float
    backward: float
    exposed: float
    buckets: tuple[BucketTimes, ...]

    @property
    def total(self) -> float:
        """Seconds from the beginning of forward to the end of backward."""
        return self.forward + self.backward + self.exposed


class Timeline:
    """The clock of a model's steps. A step that fails leaves no trace; `last` is then the one before.

    `names`: of the parameters.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._last: StepTimes | None = None
        self._ended: tuple[Step, Sequence[Sequence[int]]] | None = None  # the last step, where nobody has asked yet
        self._recordings: dict[int, list[StepTimes]] = {}
        self.forward = (0.0, 0.0)

    def forward_begins(self) -> None:
        """The module's forward is about to run."""
        self.forward = time.perf_counter(), self.forward[1]

    def forward_ends(self, waited: float, now: float) -> None:
        """End the forward. `waited`: its seconds of waits for averages of the step before, which count as that step's."""
        self.forward = self.forward[0] + waited, now

    def step_ends(self, step: Step, buckets: Sequence[Sequence[int]]) -> None:
        """End the step, whose averages are all there. `buckets`: the parameters of each."""
        self._ended = step, buckets
        for steps in tuple(self._recordings.values()):
            assert self.last is not None
            steps.append(self.last)

    @property
    def last(self) -> StepTimes | None:
        """The last step that came to its end."""
        if self._ended is not None:
            step, buckets = self._ended
            names = [tuple(self._names[index] for index in members) for members in buckets]
            self._last, self._ended = times(step, names), None
        return self._last

    @contextmanager
    def recording(self) -> Iterator[list[StepTimes]]:
        """The steps that end inside the `with`; there may be several at once."""
        steps: list[StepTimes] = []
        self._recordings[id(steps)] = steps
        try:
            yield steps
        finally:
            del self._recordings[id(steps)]


def times(step: Step, names: Sequence[tuple[str, ...]]) -> StepTimes:
    """Return the times of a step, counted from the beginning of its forward. `names`: of the parameters in each bucket."""
    began, forward_end = step.forward
    place = {name: index for index, members in enumerate(names) for name in members}
    ran: dict[int | None, list[BucketStats]] = {}
    for cost in step.costs:
        ran.setdefault(place.get(cost.parameters[0]), []).append(cost)
    buckets = [
        _bucket(step, index, names[index], ran.get(index, ()))
        for index in sorted(step.ready)  # not where this rank had no inputs, and stood in with zeros
        if index in step.launched  # else no rank used it
    ]
    last_gradient = max(step.ready.values(), default=step.last_launch)
    computed = last_gradient + step.computed - step.last_launch  # launching the last one is no computation
    return StepTimes(
        step.number, began, forward_end - began, computed - forward_end, step.ended - computed, tuple(buckets)
    )


def _bucket(step: Step, index: int, names: tuple[str, ...], costs: Iterable[BucketStats]) -> BucketTimes:
    began = step.forward[0]
    spans = [span for cost in costs for span in cost.record.spans]
    done = min(step.done.get(index, math.inf), max((end for _, _, end in spans), default=math.inf))
    since = tuple((kind, begin - began, end - began) for kind, begin, end in spans)
    return BucketTimes(index, names, step.ready[index] - began, step.launched[index] - began, done - began, since)


@contextmanager
def trace(model: torch.nn.Module, path: str | Path, *, rank: int | None = None) -> Iterator[list[StepTimes]]:
    """Record the synchronized steps inside a `with`, and write them at its end for ui.perfetto.dev or chrome://tracing.

    Write one file per rank: `with gradwire.trace(model, f"trace-{rank}.json"): ...`. Times are those of the host's
    monotonic clock, which all ranks of one machine share. On CUDA they show when work was queued.

    Args:
        model: a model wrapped in `gradwire.DistributedDataParallel`.
        path: the file to write.
        rank: the number of this process in the file; by default its rank in the model's process group.

    Yields:
        The list of `StepTimes`, which grows with each step.

    Raises:
        TypeError: the model is of another kind.
        OSError: the file cannot be written. This is checked before the first step.
    """
    timeline = getattr(model, "timeline", None)
    if not isinstance(timeline, Timeline):
        raise TypeError(
            f"trace() takes a model wrapped in gradwire.DistributedDataParallel, which keeps a timeline; got "
            f"{type(model).__name__}: wrap the module in gradwire's, or use torch.profiler"
        )
    rank = model.process_group.rank() if rank is None else rank  # type: ignore[operator, union-attr]
    path = Path(path)
    write(path, [], rank)
    with timeline.recording() as steps:
        try:
            yield steps
        finally:
            write(path, steps, rank)


def write(path: Path, steps: Sequence[StepTimes], rank: int) -> None:
    """A file of the trace event format's JSON object form."""
    events = [*_headings(steps, rank), *(event for step in steps for event in _events(step, rank))]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _headings(steps: Sequence[StepTimes], rank: int) -> Iterator[dict[str, Any]]:
    """Names for the process and its rows, in their order."""
    buckets = max((bucket.index + 1 for step in steps for bucket in step.buckets), default=0)
    rows = ["computation", *(f"bucket {index}" for index in range(buckets))]
    yield {"name": "process_name", "ph": "M", "pid": rank, "tid": COMPUTATION, "args": {"name": f"rank {rank}"}}
    for row, name in enumerate(rows):
        yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
        yield {"name": "thread_sort_index", "ph": "M", "pid": rank, "tid": row, "args": {"sort_index": row}}


def _events(step: StepTimes, rank: int) -> Iterator[dict[str, Any]]:
    """A step as complete events: computation in one row, each bucket in its own."""

    def event(row: int, name: str, begin: float, end: float, **details: Any) -> dict[str, Any]:
        start, stop = (round((step.began + moment) / MICROSECOND, DIGITS) for moment in (begin, end))
        arguments = {"step": step.step, **details}
        duration = round(stop - start, DIGITS)
        return {"name": name, "ph": "X", "ts": start, "dur": duration, "pid": rank, "tid": row, "args": arguments}

    computed = step.forward + step.backward
    yield event(COMPUTATION, "forward", 0.0, step.forward)
    yield event(COMPUTATION, "backward", step.forward, computed)
    yield event(COMPUTATION, "exposed communication", computed, step.total)
    for bucket in step.buckets:
        row, members = COMPUTATION + 1 + bucket.index, ", ".join(bucket.parameters)
        yield event(row, "waits to leave", bucket.ready, bucket.launched, parameters=members)
        yield event(row, "average", bucket.launched, bucket.done, parameters=members)
        for kind, begin, end in bucket.spans:
            yield event(row, kind, begin, end)
