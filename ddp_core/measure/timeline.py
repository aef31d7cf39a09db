"""When things happened in a step: numbers for each step, and traces for a timeline viewer."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .stats import BucketStats

MICROSECOND = 1e-6
DIGITS = 3  # of microseconds in a trace: viewers count nanoseconds
COMPUTATION = 0  # the row of a trace; buckets have those below


@dataclass(frozen=True)
class BucketTimes:
    """One bucket of a step, in seconds since its forward began.

    `index`: its place in the order of buckets, some of which a step may not send. `ready`: its last gradient was there.
    `launched`: no earlier bucket held it any more, and it was given to its compressor. `done`: its average was there.
    `spans`: (encode, wait or decode; begin; end) of its program, as in `Record`; none with a hook that is not gradwire's.

    On CUDA these are times of the host, which only queues the work: `done` and `spans` then tell when it was queued, not
    when the GPU did it.
    """

    index: int
    parameters: tuple[str, ...]
    ready: float
    launched: float
    done: float
    spans: tuple[tuple[str, float, float], ...] = ()


@dataclass(frozen=True)
class StepTimes:
    """A synchronized step: where its seconds went, by the host's clock. On CUDA that is when work was queued.

    `step`: its number, from 1. `forward`: of the module, the last one before backward. `backward`: from the end of forward
    to the last gradient, the user's loss included. `exposed`: communication that no computation hid, from the last gradient
    until backward could return; what backward computes after it, outside the module, counts as `backward`. `began`: the
    host's monotonic clock (time.perf_counter) when forward began. `buckets`: those that were sent, in order.
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


@dataclass
class Marks:
    """What is noted of a bucket, by time.perf_counter."""

    ready: float
    launched: float = math.inf
    done: float = math.inf

    def end(self, _: object) -> None:
        """The average is there, its future says."""
        self.done = min(self.done, time.perf_counter())

    def since(self, began: float, index: int, names: tuple[str, ...], programs: Iterable[BucketStats]) -> BucketTimes:
        """The same counted from `began`."""
        spans = [span for program in programs for span in program.record.spans]
        done = min(self.done, max((end for _, _, end in spans), default=math.inf))
        return BucketTimes(
            index,
            names,
            self.ready - began,
            self.launched - began,
            done - began,
            tuple((kind, begin - began, end - began) for kind, begin, end in spans),
        )


class Timeline:
    """The clock of a model's steps. It takes a mark a bucket, not a parameter, so it is always on.

    A step that fails leaves no trace; `last` is then the one before.
    """

    def __init__(self) -> None:
        self._last: StepTimes | None = None
        self._ended: Callable[[], StepTimes] | None = None  # tells of the last step, where nobody has asked yet
        self._names: Sequence[tuple[str, ...]] = ()
        self._place: dict[str, int] = {}
        self._recordings: dict[int, list[StepTimes]] = {}
        self._forward = self._step_forward = (0.0, 0.0)
        self._marks: dict[int, Marks] = {}
        self._last_gradient = self._last_launch = self._computed = 0.0

    def name_buckets(self, names: Sequence[tuple[str, ...]]) -> None:
        """The buckets' parameters, from the next step on."""
        self._names = names
        self._place = {name: index for index, members in enumerate(names) for name in members}

    def forward_begins(self) -> None:
        """The module's forward is about to run."""
        self._forward = time.perf_counter(), self._forward[1]

    def forward_ends(self) -> None:
        """It has run."""
        self._forward = self._forward[0], time.perf_counter()

    def step_begins(self) -> None:
        """The backward of this forward is to be synchronized; others may run before it."""
        self._step_forward, self._marks = self._forward, {}

    def bucket_ready(self, index: int) -> None:
        """A bucket has got its last gradient."""
        self._last_gradient = time.perf_counter()
        self._marks[index] = Marks(self._last_gradient)

    def bucket_launched(self, index: int) -> None:
        """A bucket is about to be averaged."""
        if index in self._marks:  # not where this rank has no inputs, and stands in with zeros
            self._marks[index].launched = time.perf_counter()

    def watch(self, index: int, average: object) -> None:
        """Note when the average of somebody's hook is there; those of programs tell by their spans.

        A hook may return any object that can be waited for.
        """
        if index in self._marks and isinstance(average, torch.futures.Future):
            average.add_done_callback(self._marks[index].end)

    def bucket_done(self, index: int) -> None:
        """Backward has waited for a bucket's average."""
        if (mark := self._marks.get(index)) is not None and mark.done == math.inf:
            mark.done = time.perf_counter()

    def all_launched(self) -> None:
        """The last bucket is on its way."""
        self._last_launch = time.perf_counter()

    def computation_ends(self) -> None:
        """Backward has nothing left to compute."""
        self._computed = time.perf_counter()

    def step_ends(self, step: int, programs: Sequence[BucketStats]) -> None:
        """All averages are there. `programs`: of the buckets, matched by their parameters."""
        marks, self._marks = self._marks, {}
        computed = self._last_gradient + self._computed - self._last_launch  # launching the last one is no computation
        spans = (*self._step_forward, computed, time.perf_counter())
        self._ended = partial(_times, step, spans, marks, programs, self._names, self._place)
        for steps in tuple(self._recordings.values()):
            assert self.last is not None
            steps.append(self.last)

    @property
    def last(self) -> StepTimes | None:
        """The last step that came to its end."""
        if self._ended is not None:
            self._last, self._ended = self._ended(), None
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


def _times(
    step: int,
    spans: tuple[float, float, float, float],
    marks: Mapping[int, Marks],
    programs: Iterable[BucketStats],
    names: Sequence[tuple[str, ...]],
    place: Mapping[str, int],
) -> StepTimes:
    """`spans`: when forward began, forward ended, the last gradient came and the step ended."""
    began, forward_end, computed, end = spans
    ran: dict[int | None, list[BucketStats]] = {}
    for program in programs:
        ran.setdefault(place.get(program.parameters[0]), []).append(program)
    buckets = [
        mark.since(began, index, names[index], ran.get(index, ()))
        for index, mark in sorted(marks.items())
        if mark.launched < math.inf  # else no rank used it
    ]
    return StepTimes(step, began, forward_end - began, computed - forward_end, end - computed, tuple(buckets))


@contextmanager
def trace(model: torch.nn.Module, path: str | Path, *, rank: int | None = None) -> Iterator[list[StepTimes]]:
    """Record the synchronized steps inside a `with`; at its end write them for ui.perfetto.dev or chrome://tracing.

    One file a rank: `with gradwire.trace(model, f"trace-{rank}.json"): ...`. `model`: wrapped in
    gradwire.DistributedDataParallel. `rank`: what the file calls this process, by default its rank in the model's process
    group. Times are the host's monotonic clock, which all ranks of one machine share; on CUDA they tell when work was
    queued. The `with` gives the list of steps.

    Raises TypeError for another model, and OSError at once where `path` cannot be written.
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
