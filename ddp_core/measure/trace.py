"""Traces of steps for a timeline viewer, in the trace event format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .timeline import StepTimes, Timeline

MICROSECOND = 1e-6
DIGITS = 3  # of microseconds in a trace: viewers count nanoseconds
COMPUTATION = 0  # the row of a trace; buckets have those below


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
