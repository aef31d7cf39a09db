"""A step replayed: what it takes if its pieces go in a given order, and which order to give."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from .step_model import StepModel


@dataclass(frozen=True)
class Replay:
    """A step in its steady state, in seconds.

    `step`: from the beginning of a backward to that of the next. `exposed`: what of it is no computation. `started`,
    `arrived`: of each piece, counted from the beginning of backward.
    """

    step: float
    exposed: float
    started: tuple[float, ...]
    arrived: tuple[float, ...]


def replay(model: StepModel, order: Sequence[int], *, until_needed: bool = True) -> Replay:
    """Send the pieces over one link in `order`, a permutation of their indices, whatever gets ready when.

    A piece starts when it is ready, the link is free, and all before it in the order have started. `until_needed`: the
    next forward begins with backward's end and waits for each piece where it needs it; else it begins when all pieces have
    arrived, as with a synchronous step. All pieces arrive before the step ends, so that one step tells all. Raises
    ValueError where `order` is no permutation.
    """
    if sorted(order) != list(range(len(model.pieces))):
        raise ValueError(f"an order has each of the {len(model.pieces)} pieces once, got {list(order)}")
    started, arrived = [0.0] * len(order), [0.0] * len(order)
    free = 0.0
    for index in order:
        started[index] = max(free, model.pieces[index].ready)
        free = arrived[index] = started[index] + model.pieces[index].wire
    step = _delayed(model, arrived) if until_needed else model.forward + max(model.backward, free)
    return Replay(step, step - model.computation, tuple(started), tuple(arrived))


def _delayed(model: StepModel, arrived: Sequence[float]) -> float:
    """The step's seconds: after a piece has arrived, what forward has left from there on still has to run."""
    late = (moment + model.forward - piece.needed for moment, piece in zip(arrived, model.pieces, strict=True))
    return max([model.computation, *late])


def backward_order(model: StepModel) -> list[int]:
    """The pieces as they get ready: what a synchronous step sends."""
    return sorted(range(len(model.pieces)), key=lambda index: model.pieces[index].ready)


def planned_order(model: StepModel) -> list[int]:
    """The order to send in: whenever the link gets free, of the pieces that are ready the one that is needed first.

    Earliest deadline first without preemption (Jackson 1955): its step is longer than `optimal` by the seconds of one
    piece at most, since no piece waits behind more than one that is needed later.
    """
    waiting = backward_order(model)[::-1]
    ready: list[tuple[float, float, int]] = []
    order: list[int] = []
    now = 0.0
    while waiting or ready:
        if not ready:
            now = max(now, model.pieces[waiting[-1]].ready)
        while waiting and model.pieces[waiting[-1]].ready <= now:
            piece = model.pieces[waiting[-1]]
            heapq.heappush(ready, (piece.needed, piece.ready, waiting.pop()))
        order.append(heapq.heappop(ready)[-1])
        now += model.pieces[order[-1]].wire
    return order
