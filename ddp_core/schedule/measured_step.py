"""Overlapped steps as a planner sees them, from what was measured: ready and needed times, and the link's cost."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..measure.record import Record, replies
from ..planning.link_cost import LinkCost
from ..planning.step_model import Piece, StepModel

KEPT = 8  # steps


@dataclass(frozen=True)
class MeasuredStep:
    """A step, with times in seconds.

    `forward`, `backward`: of computation, without waits. `ready`: by bucket, after the end of forward. `needed`: by bucket,
    after the beginning of the next forward, had that never waited. `records`: of what was sent, in the order sent.
    """

    forward: float
    backward: float
    ready: Sequence[float]
    needed: Sequence[float]
    records: Sequence[Record]


class Measurements:
    """The last steps. They are kept as they are, and looked at when an order is chosen."""

    def __init__(self) -> None:
        self._steps: deque[MeasuredStep] = deque(maxlen=KEPT)

    def add(self, step: MeasuredStep) -> None:
        """One more."""
        self._steps.append(step)

    def clear(self) -> None:
        """Other buckets: what was measured says nothing of them."""
        self._steps.clear()

    def model(self, sending: Sequence[int]) -> StepModel | None:
        """The median step, a piece for each of what is sent, by place in `sending`: the bucket of each, in the order that
        was used; None where nothing was measured.
        """
        steps = [step for step in self._steps if len(step.records) == len(sending)]
        if not steps:
            return None
        samples = [sample for step in steps for sample in link_samples(step.records)]
        if not any(sent for sent, _ in samples):
            return None
        cost = LinkCost.fitted(samples)
        forward = statistics.median(step.forward for step in steps)
        backward = statistics.median(step.backward for step in steps)
        pieces = []
        for place, bucket in enumerate(sending):
            ready = statistics.median(step.ready[bucket] for step in steps)
            needed = statistics.median(step.needed[bucket] for step in steps)
            sent = [bytes_sent for _, _, bytes_sent in steps[-1].records[place].requests]
            wire = cost.seconds(sum(sent), len(sent))
            pieces.append(Piece(min(max(0.0, ready), backward), wire, min(max(0.0, needed), forward)))
        return StepModel(forward, backward, tuple(pieces))


def link_samples(records: Sequence[Record]) -> Iterator[tuple[float, float]]:
    """(bytes sent, seconds that the link was held) of each request: a reply has waited for those that came before it."""
    free = 0.0
    for end, begin, sent in sorted((end, begin, sent) for begin, end, _, sent in replies(records)):
        yield sent, end - max(begin, free)
        free = end
