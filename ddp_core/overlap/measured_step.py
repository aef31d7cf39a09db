"""Overlapped steps as a planner sees them, from what was noted: ready and needed times, and the link's cost."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ..measure.clock import Clock
from ..measure.step import Record, replies
from ..measure.step_model import LinkCost, Piece, StepModel, link_samples
from .pending_update import PendingUpdate

KEPT = 8  # steps


@dataclass(frozen=True)
class MeasuredStep:
    """A step, with times in seconds.

    `forward`, `backward`: of computation, without waits. `ready`: by bucket, after the end of forward. `needed`: by bucket,
    after the beginning of the next forward, had that never waited. `requests`: of each program, in the order sent, the bytes
    that each of its requests sent. `samples`: (bytes sent, seconds that the link was held) of each request. `exposed`:
    seconds of all waits.
    """

    forward: float
    backward: float
    ready: Sequence[float]
    needed: Sequence[float]
    requests: Sequence[Sequence[float]]
    samples: Sequence[tuple[float, float]]
    exposed: float


@dataclass(frozen=True)
class NotedStep:
    """The notes of a step, by marks of a clock.

    `forward_end`: of the forward before its backward. `ready`: by bucket. `forward`: beginning and end of the next one.
    `waits`: by bucket, when its average was first needed, and when it was there. `records`: of programs, in the order sent.
    """

    forward_end: float
    ready: Mapping[int, float]
    forward: tuple[float, float]
    waits: Sequence[tuple[float, float]]
    records: Sequence[Record]

    def measured(self, clock: Clock) -> MeasuredStep | None:
        """In seconds; None where not all of its marks are of the clock. Waits for what a device has not reached yet."""
        if not all(map(clock.took, self._marks())):
            return None
        at = partial(clock.seconds, self.forward_end)
        began, ended = map(at, self.forward)
        waits = [(at(needed) - began, clock.seconds(needed, arrived)) for needed, arrived in self.waits]
        needed, waited = unhindered(waits, ended - began)
        ready = [at(self.ready[bucket]) for bucket in range(len(waits))]
        replied = [(at(begin), at(end), scope, sent) for begin, end, scope, sent in replies(self.records)]
        return MeasuredStep(
            forward=max(0.0, ended - began - waited),
            backward=max(0.0, *ready),
            ready=ready,
            needed=needed,
            requests=[[sent for _, _, sent in record.requests] for record in self.records],
            samples=list(link_samples(replied)),
            exposed=sum(seconds for _, seconds in waits),
        )

    def _marks(self) -> Iterator[float]:
        yield from (self.forward_end, *self.forward, *self.ready.values())
        for wait in self.waits:
            yield from wait
        for begin, end, _, _ in replies(self.records):
            yield from (begin, end)


def noted(updates: Sequence[PendingUpdate], forward: tuple[float, float]) -> NotedStep:
    """A step whose updates were all made in a `forward`, or before it. `updates`: by bucket."""
    step = updates[0].backward.step
    waits = [(update.needed, update.arrived) for update in updates]
    return NotedStep(step.forward[1], step.ready, forward, waits, [cost.record for cost in step.costs])


def unhindered(waits: Sequence[tuple[float, float]], forward: float) -> tuple[list[float], float]:
    """Return the times at which a forward without waits needs each average, and the seconds of waits in the forward.

    `waits`: when each began, after the beginning of forward, and its seconds. `forward`: its seconds, with waits.
    """
    needed, waited = [0.0] * len(waits), 0.0
    for place in sorted(range(len(waits)), key=waits.__getitem__):
        at, seconds = waits[place]
        needed[place] = max(0.0, at - waited)
        waited += seconds if 0.0 <= at <= forward else 0.0
    return needed, waited


class Measurements:
    """The last steps. They are kept as they were noted, and looked at when an order is chosen.

    `exposed`: seconds of all waits of the last one that was looked at; None before.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps: deque[NotedStep] = deque(maxlen=KEPT)
        self.exposed: float | None = None

    def add(self, step: NotedStep) -> None:
        """One more."""
        self._steps.append(step)

    def clear(self) -> None:
        """Other buckets: what was measured says nothing of them."""
        self._steps.clear()

    def model(self, sending: Sequence[int]) -> StepModel | None:
        """The median step, a piece for each of what is sent, by place in `sending`: the bucket of each, in the order that
        was used; None where nothing was measured. Waits for a device to come to the end of what was noted.
        """
        noted = [step.measured(self._clock) for step in self._steps if len(step.records) == len(sending)]
        steps = [step for step in noted if step is not None]
        if not steps:
            return None
        self.exposed = steps[-1].exposed
        samples = [sample for step in steps for sample in step.samples]
        if not any(sent for sent, _ in samples):
            return None
        cost = LinkCost.fitted(samples)
        forward = statistics.median(step.forward for step in steps)
        backward = statistics.median(step.backward for step in steps)
        pieces = []
        for place, bucket in enumerate(sending):
            ready = statistics.median(step.ready[bucket] for step in steps)
            needed = statistics.median(step.needed[bucket] for step in steps)
            sent = steps[-1].requests[place]
            wire = cost.seconds(sum(sent), len(sent))
            pieces.append(Piece(min(max(0.0, ready), backward), wire, min(max(0.0, needed), forward)))
        return StepModel(forward, backward, tuple(pieces))
