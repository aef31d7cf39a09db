"""Pieces on one link: when each arrives, an order to send them in, and bounds over all orders."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from .step_model import StepModel

ROUNDS = 64  # of listing the pieces anew


def arrivals(model: StepModel, order: Sequence[int]) -> list[float]:
    """Return when each piece has arrived, in seconds after the beginning of backward, if the pieces are sent in `order`.

    A piece starts when it is ready, the link is free, and all before it in the order have started. All pieces arrive before
    the step ends, so that one step tells all. Raises ValueError where `order` is no permutation of the pieces' indices.
    """
    if sorted(order) != list(range(len(model.pieces))):
        raise ValueError(f"an order has each of the {len(model.pieces)} pieces once, got {list(order)}")
    arrived, free = [0.0] * len(order), 0.0
    for index in order:
        free = arrived[index] = max(free, model.pieces[index].ready) + model.pieces[index].wire
    return arrived


def step_seconds(model: StepModel, arrived: Sequence[float]) -> float:
    """Return the seconds of a step whose next forward begins with backward's end and waits for each piece where it needs it.

    After a piece has arrived, what forward has left from there on still has to run.
    """
    late = (moment + model.forward - piece.needed for moment, piece in zip(arrived, model.pieces, strict=True))
    return max([model.computation, *late])


def backward_order(model: StepModel) -> list[int]:
    """The pieces as they get ready: what a synchronous step sends."""
    return sorted(range(len(model.pieces)), key=lambda index: model.pieces[index].ready)


def priority_order(model: StepModel) -> list[int]:
    """The order to send in, near the best one: its step is longer than `optimal` by the seconds of one piece at most.

    Whenever the link gets free, the piece that is needed first of those that are ready (Jackson 1955). Where the latest
    piece then waits behind one that is needed later, that one is kept back until it is ready, and all is listed again,
    `ROUNDS` times at most (Potts 1980); the best of these orders counts.
    """
    ready = [piece.ready for piece in model.pieces]
    tried: list[tuple[float, list[int]]] = []
    for _ in range(ROUNDS):
        order = _listed(model, ready)
        arrived = arrivals(model, order)
        seconds = step_seconds(model, arrived)
        tried.append((seconds, order))
        pair = _in_the_way(model, order, arrived) if seconds > model.computation else None
        if pair is None:
            break
        first, latest = pair
        ready[first] = max(ready[first], ready[latest])
    return min(tried, key=lambda each: each[0])[1]


def _listed(model: StepModel, ready: Sequence[float]) -> list[int]:
    """First needed, first sent, of the pieces that are ready when the link gets free."""
    waiting = sorted(range(len(ready)), key=ready.__getitem__, reverse=True)
    there: list[tuple[float, float, int]] = []
    order: list[int] = []
    now = 0.0
    while waiting or there:
        if not there:
            now = max(now, ready[waiting[-1]])
        while waiting and ready[waiting[-1]] <= now:
            piece = model.pieces[waiting[-1]]
            heapq.heappush(there, (piece.needed, piece.ready, waiting.pop()))
        order.append(heapq.heappop(there)[-1])
        now += model.pieces[order[-1]].wire
    return order


def _in_the_way(model: StepModel, order: Sequence[int], arrived: Sequence[float]) -> tuple[int, int] | None:
    """The last piece that is sent before the latest one, without a pause of the link, and needed after it; and the latest.

    None where there is none: then no order is better.
    """
    latest = max(order, key=lambda index: arrived[index] - model.pieces[index].needed)
    following = latest
    for index in reversed(order[: order.index(latest)]):
        if arrived[index] < model.pieces[following].ready:
            return None
        if model.pieces[index].needed > model.pieces[latest].needed:
            return index, latest
        following = index
    return None


def optimal(model: StepModel) -> float:
    """Return the seconds of the shortest possible step, over all orders of sending and all ways to cut the pieces.

    The rule is earliest deadline first with preemption, which is optimal on one link (Horn 1974). For layers whose
    gradients get ready in the reverse order of forward it is max(F + B, max over i of wire of layers 0 to i +
    computation of layers i and on).

    Args:
        model: the step.

    Returns:
        Seconds.
    """
    return step_seconds(model, _preempted(model))


def _preempted(model: StepModel) -> list[float]:
    """When each piece has arrived where the piece that is needed first always goes, whatever is under way."""
    waiting = backward_order(model)[::-1]
    ready: list[tuple[float, int]] = []
    left = [piece.wire for piece in model.pieces]
    arrived, now = [0.0] * len(left), 0.0
    while waiting or ready:
        if not ready:
            now = max(now, model.pieces[waiting[-1]].ready)
        while waiting and model.pieces[waiting[-1]].ready <= now:
            heapq.heappush(ready, (model.pieces[waiting[-1]].needed, waiting.pop()))
        first = ready[0][-1]
        ends = now + left[first]
        until = min(ends, model.pieces[waiting[-1]].ready) if waiting else ends
        left[first], now = left[first] - (until - now), until
        if until == ends:
            heapq.heappop(ready)
            arrived[first] = now
    return arrived


def synchronous(model: StepModel) -> float:
    """Return the seconds of a step whose forward waits for all averages of the step before.

    The link never idles while a piece is ready. No other order and no cut of the pieces is faster.

    Args:
        model: the step.

    Returns:
        Seconds.
    """
    return model.forward + max([model.backward, *arrivals(model, backward_order(model))])
