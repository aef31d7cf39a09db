"""How error feedback fares on this rank: samples of what is held back and of what is sent, read later."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import Residual
from .protocol import working_dtype
from .state import parts

EVERY = 16  # steps from sample to sample
ELEMENTS = 4096  # of a bucket in a sample, about
FADES = 0.75  # the share of the sums so far in those after the next sample
SETTLE = 8  # samples before which nothing is judged: at first gradients point one way, and add up by rights
MANY = 8.0  # gradients held back that are no cause for concern yet
BEYOND = 2.0  # times the residual of `settled`


class Gauge:
    """Sums over a sample of a bucket at every `EVERY`th step of this rank; nothing waits for a GPU until they are read.

    What was meant is gradient + residual before the step, what was sent that - residual after it.
    """

    def __init__(self) -> None:
        self.taken: Tensor | None = None  # the newest sample's sums, where they were computed
        self.guarded = False  # somebody else sees to it
        self._steps = 0
        self._given: tuple[Tensor, Tensor] | None = None
        self._arriving: Arriving | None = None
        self._sums: list[float] = []  # of the samples so far, the older the less

    def begin(self, grad: Tensor, held: Residual) -> None:
        """Before a step: note what is given, if it is time to."""
        self._given, self.taken = None, None
        if self._steps % EVERY == EVERY - 1 and grad.numel():
            given = sampled(grad).to(working_dtype(grad.dtype), copy=True)
            self._given = given, given + sampled(held.before)
        self._steps += 1

    def end(self, held: Residual) -> None:
        """After it: the sums of |gradient|², |held back|², meant x sent, |meant|² and |sent|²."""
        if self._given is None:
            return
        (grad, meant), kept = self._given, sampled(held.after)
        sent = meant - kept
        pairs = ((grad, grad), (kept, kept), (meant, sent), (meant, meant), (sent, sent))
        self.taken, self._given = torch.stack([torch.dot(a, b) for a, b in pairs]), None
        self._look()
        self._arriving = Arriving(self.taken)

    def _look(self) -> None:
        """Add the sums that have arrived to those before."""
        if self._arriving is not None:
            self._sums, self._arriving = faded(self._sums, self._arriving.read()), None

    @property
    def sums(self) -> list[float]:
        """All samples so far, faded; empty before the first. May wait for a GPU."""
        self._look()
        return self._sums

    @property
    def residual_ratio(self) -> float | None:
        """Norm of what this rank holds back of the bucket over that of its gradient; None before the first sample."""
        return ratio(self.sums) if self.sums else None

    @property
    def cosine(self) -> float | None:
        """Of the angle between what this rank meant to send (gradient and residual) and what it sent; None as above."""
        return cosine(self.sums) if self.sums else None

    @property
    def runs_away(self) -> bool:
        """Whether the residual of this rank does, by the samples that have arrived."""
        if self._arriving is not None and self._arriving.arrived:
            self._look()
        return runs_away(self._sums)


class Arriving:
    """Numbers on their way from the device to the host; only reading them may wait."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._event = numbers, None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(numbers.get_device()))

    @property
    def arrived(self) -> bool:
        """Whether reading would not wait."""
        return self._event is None or self._event.query()

    def read(self) -> list[float]:
        """The numbers."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()


def sampled(flat: Tensor) -> Tensor:
    """Every so many of the elements, an odd number, so as not to meet the same column of each row."""
    return flat[:: (flat.numel() // ELEMENTS) | 1]


def faded(before: Sequence[float], new: Sequence[float]) -> list[float]:
    """The sums with a new sample in them, then how many there were; one that is not finite is of a step that does not count."""
    if not all(map(math.isfinite, new)):
        return list(before)
    *old, samples = before or [0.0] * (len(new) + 1)
    return [*(FADES * sum_ + number for sum_, number in zip(old, new, strict=True)), samples + 1]


def ratio(sums: Sequence[float]) -> float:
    """Norm of what is held back over that of the gradient."""
    return math.sqrt(sums[1] / sums[0]) if sums[0] else 0.0


def cosine(sums: Sequence[float]) -> float:
    """Of the angle between what was meant and what was sent; 1 where there was nothing to send."""
    lengths = math.sqrt(sums[3] * sums[4])
    return min(1.0, sums[2] / lengths) if lengths else float(not sums[3])


def settled(cosine: float) -> float:
    """Norm of what is held back over that of gradients, when these do not depend on each other and their size stays.

    A step that sends what is meant at an angle leaves over its sine. So |e|² = sin² (|g|² + |e|²) in the long run.
    """
    return math.sqrt(1 - cosine**2) / cosine if cosine > 0 else math.inf


def runs_away(sums: Sequence[float]) -> bool:
    """Whether a residual is far larger than gradients of their present size make it: what waits has added up, not averaged out.

    Either old gradients were larger, so that steps are late, or the optimizer overshoots and gradients answer to steps.
    """
    if not sums or sums[-1] < SETTLE or ratio(sums) <= MANY:
        return False
    across = cosine(sums)
    return across <= 0 or ratio(sums) > BEYOND * settled(across)


def gauges(state: Any) -> Iterator[Gauge]:
    """Those in a compressor's state."""
    if isinstance(state, Gauge):
        yield state
    for _, part in parts(state):
        yield from gauges(part)
