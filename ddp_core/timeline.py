"""When things happened in a step: numbers for each step, and traces for a timeline viewer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .stats import BucketStats

MICROSECOND = 1e-6


@dataclass(frozen=True)
class BucketTimes:
    """One bucket of a step, in seconds since its forward began.

    `ready`: its last gradient was there. `launched`: it was given to its compressor. `done`: its average was there.
    `spans`: (encode, wait or decode; begin; end) of its program; none with a hook that is not gradwire's.
    """

    parameters: tuple[str, ...]
    ready: float
    launched: float
    done: float
    spans: tuple[tuple[str, float, float], ...] = ()


@dataclass(frozen=True)
class StepTimes:
    """A synchronized step: where its seconds went.

    `forward`: of the module. `backward`: from the end of forward to the last gradient, the user's loss included. `exposed`:
    communication that no computation hid, from the last gradient until backward could return. `began`: the host's
    monotonic clock (time.perf_counter) when forward began.
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
class BucketMarks:
    """What the reducer notes of a bucket, by time.perf_counter."""

    ready: float = 0.0
    launched: float = 0.0
    done: float = 0.0


class Timeline:
    """The clock of a model's steps. A mark costs a tenth of a microsecond, so it is always on."""

    def __init__(self) -> None:
        self.last: StepTimes | None = None
        self.listeners: list[Callable[[StepTimes], None]] = []
        self.began = self.forward_end = self.last_gradient = 0.0
        self._steps = 0

    def forward_begins(self) -> None:
        """The module's forward is about to run."""
        self.began = time.perf_counter()

    def forward_ends(self) -> None:
        """It has run."""
        self.forward_end = time.perf_counter()

    def gradients_end(self) -> None:
        """The last gradient of the step is there; only communication is left."""
        self.last_gradient = time.perf_counter()

    def step_ends(
        self, marks: Sequence[BucketMarks], names: Sequence[tuple[str, ...]], stats: Sequence[BucketStats]
    ) -> None:
        """All averages are there. `stats`: of the buckets' programs, matched by their parameters."""
        self._steps += 1
        spans = {name: each.record.spans for each in stats for name in each.parameters}
        buckets = tuple(
            BucketTimes(
                members,
                mark.ready - self.began,
                mark.launched - self.began,
                mark.done - self.began,
                tuple((kind, begin - self.began, end - self.began) for kind, begin, end in spans.get(members[0], ())),
            )
            for mark, members in zip(marks, names, strict=True)
        )
        self.last = StepTimes(
            self._steps,
            self.began,
            self.forward_end - self.began,
            self.last_gradient - self.forward_end,
            time.perf_counter() - self.last_gradient,
            buckets,
        )
        for listener in self.listeners:
            listener(self.last)


class Traced(Protocol):
    """A model that keeps a timeline."""

    timeline: Timeline


@contextmanager
def trace(model: Traced, path: str | Path, *, rank: int = 0) -> Iterator[list[StepTimes]]:
    """Record the synchronized steps inside a `with`, and write them for Perfetto or chrome://tracing at its end.

    One file a rank: `with gradwire.trace(model, f"trace-{rank}.json", rank=rank): ...`. Raises OSError at once where `path`
    cannot be written.
    """
    path = Path(path)
    path.write_text(json.dumps({"traceEvents": []}))
    steps: list[StepTimes] = []
    model.timeline.listeners.append(steps.append)
    try:
        yield steps
    finally:
        model.timeline.listeners.remove(steps.append)
        events = [event for step in steps for event in _events(step, rank)]
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _events(step: StepTimes, rank: int) -> Iterator[dict[str, Any]]:
    """A step in the trace event format: computation in one row, each bucket in its own."""

    def event(row: str, name: str, begin: float, end: float, **details: Any) -> dict[str, Any]:
        start = (step.began + begin) / MICROSECOND
        return {
            "name": name,
            "ph": "X",
            "ts": start,
            "dur": (end - begin) / MICROSECOND,
            "pid": f"rank {rank}",
            "tid": row,
            "args": {"step": step.step, **details},
        }

    gradients_end = step.forward + step.backward
    yield event("computation", "forward", 0.0, step.forward)
    yield event("computation", "backward", step.forward, gradients_end)
    yield event("computation", "exposed communication", gradients_end, step.total)
    for index, bucket in enumerate(step.buckets):
        row, members = f"bucket {index}", ", ".join(bucket.parameters)
        yield event(row, "held for earlier buckets", bucket.ready, bucket.launched, parameters=members)
        yield event(row, "bucket", bucket.launched, bucket.done, parameters=members)
        for kind, begin, end in bucket.spans:
            yield event(row, kind, begin, end)
