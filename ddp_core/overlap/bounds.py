"""The shortest step over all orders of sending, and the time of a step that waits for all that is sent."""

from __future__ import annotations

import heapq

from .replay import backward_order, replay
from .step_model import StepModel


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
    return max(
        [model.computation, *(moment + model.forward - model.pieces[i].needed for i, moment in _preempted(model))]
    )


def _preempted(model: StepModel) -> list[tuple[int, float]]:
    """(piece, when it has arrived) where the piece that is needed first always goes, whatever is under way."""
    waiting = backward_order(model)[::-1]
    ready: list[tuple[float, int]] = []
    left = [piece.wire for piece in model.pieces]
    arrived: list[tuple[int, float]] = []
    now = 0.0
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
            arrived.append((first, now))
    return arrived


def synchronous(model: StepModel) -> float:
    """Return the seconds of a step whose forward waits for all averages of the step before.

    The link never idles while a piece is ready. No other order and no cut of the pieces is faster.

    Args:
        model: the step.

    Returns:
        Seconds.
    """
    return replay(model, backward_order(model), until_needed=False).step
