"""The time of a step that sends gradients uncompressed, from the steps that were measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ..measure.link_schedule import synchronous
from ..measure.stats import Measured, dense_bytes, exposed
from ..measure.step import Step, replies
from ..measure.step_model import LinkCost, Piece, StepModel, link_samples


def dense_step_seconds(measured: Measured) -> float | None:
    """Seconds, on a link that costs what it costs now; None where what was measured does not tell.

    That is on a GPU, with shards, on one rank, in traffic inside hosts, of a link whose cost does not depend on bytes, and
    where nothing is compressed. It is no promise: waiting for slower ranks counts as the link's, and arithmetic beside
    backward as computation, so that it rather says too much.
    """
    steps = [step for step in measured.steps if step.interval and exposed(step) is not None]
    records = [cost.record for step in steps for cost in step.costs]
    across = all(scope == "all" for record in records for scope, _, _ in record.requests)
    if not (steps and across and measured.on_host and not measured.sharded and measured.ranks > 1):
        return None
    samples = [each for step in steps for each in link_samples(replies(cost.record for cost in step.costs))]
    if not any(sent for sent, _ in samples):
        return None
    link = LinkCost.fitted(samples)
    if not link.beta or _sent(steps[-1]) >= dense_bytes(steps[-1].costs, measured):
        return None
    computation = statistics.fmean(step.interval - (exposed(step) or 0.0) for step in steps)
    wires = [link.seconds(dense_bytes([cost], measured)) for cost in steps[-1].costs]
    return computation + _exposed(_ready(steps), wires)


def _sent(step: Step) -> float:
    return sum(sent for cost in step.costs for _, _, sent in cost.record.requests)


def _ready(steps: Sequence[Step]) -> list[float]:
    """Return the time at which each bucket was given, in seconds after the first: medians over steps like the last one."""
    alike = [step.costs for step in steps if len(step.costs) == len(steps[-1].costs)]
    given = [[cost.given - costs[0].given for cost in costs] for costs in alike]
    return [statistics.median(column) for column in zip(*given, strict=True)]


def _exposed(ready: Sequence[float], wires: Sequence[float]) -> float:
    pieces = tuple(Piece(max(0.0, at), wire, 0.0) for at, wire in zip(ready, wires, strict=True))
    model = StepModel(0.0, max(piece.ready for piece in pieces), pieces)
    return synchronous(model) - model.computation
