"""Samples of this rank's residuals and of what it sends, read later."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels import Residual
from ..protocol.layout import working_dtype
from .tree import parts

EVERY = 16  # steps from sample to sample
ELEMENTS = 4096  # of a bucket in a sample, about
WARM_UP = 8  # samples before residuals are judged: at first gradients point one way, and add up by rights
IN_A_ROW = 2  # samples that have to agree
MANY = 8.0  # a residual is judged too large only above so many times the gradient's norm
BEYOND = 2.0  # times the residual of `steady`
GROWN = 8.0  # times the gradients of the last samples, in the geometric mean
OLD = 0.9  # the share of that mean before a sample in the one after it


class Sample(NamedTuple):
    """A sample of a bucket: the logarithm of |gradient|, and in units of |gradient|² the rest.

    `held`: |held back|²; `along`: meant x sent; `meant`: |meant|²; `sent`: |sent|². What was meant is gradient + residual
    before the step, what was sent that - residual after it.
    """

    log_gradient: float
    held: float
    along: float
    meant: float
    sent: float

    @property
    def ratio(self) -> float:
        """Norm of what is held back over that of the gradient."""
        return math.sqrt(self.held)

    @property
    def cosine(self) -> float:
        """The cosine between what was meant and what was sent; 1 where there was nothing to send."""
        lengths = math.sqrt(self.meant * self.sent)
        return min(1.0, self.along / lengths) if lengths else float(not self.meant)

    @property
    def too_large(self) -> bool:
        """True if a residual is much larger than gradients of their present size make it: what waits adds up and stays.

        Then either gradients were much larger before, so that steps come late, or steps overshoot and gradients answer to
        them; or what is sent points away from what is meant.
        """
        return self.ratio > MANY and (self.cosine <= 0 or self.ratio > BEYOND * steady(self.cosine))


def steady(cosine: float) -> float:
    """Norm of what is held back over that of gradients, when these do not depend on each other and their size stays.

    A step that sends what is meant at an angle leaves over its sine. So |e|² = sin² (|g|² + |e|²) in the long run.
    """
    return math.sqrt(1 - cosine**2) / cosine if cosine > 0 else math.inf


class SampleHistory(NamedTuple):
    """Samples so far; how many in a row up to the newest were bad; and the mean logarithm of |gradient|, the old fading."""

    samples: int = 0
    in_a_row: int = 0
    log_mean: float = 0.0

    def and_then(self, sample: Sample) -> SampleHistory:
        """With a further sample. It is bad if the residual is too large, or if it is large and gradients grow and grow.

        In a feedback that is not stable both grow alike, and their ratio tells nothing.
        """
        mean = self.log_mean if self.samples else sample.log_gradient
        grows = sample.ratio > 1 and sample.log_gradient - mean > math.log(GROWN)
        bad = grows or (sample.too_large and self.samples + 1 >= WARM_UP)
        mean = OLD * mean + (1 - OLD) * sample.log_gradient
        return SampleHistory(self.samples + 1, self.in_a_row + 1 if bad else 0, mean)

    @property
    def runs_away(self) -> bool:
        """True if error feedback diverges."""
        return self.in_a_row >= IN_A_ROW


class Gauge:
    """Takes a sample of a bucket at every `EVERY`th step of this rank; no step waits for a GPU because of it."""

    def __init__(self) -> None:
        self._steps = 0
        self._given: tuple[Tensor, Tensor] | None = None
        self._arriving: Arriving | None = None
        self._newest: Sample | None = None
        self._seen = SampleHistory()

    def begin(self, grad: Tensor, held: Residual) -> None:
        """Before a step: note what is given, if it is time to."""
        self._given = None
        if self._steps % EVERY == EVERY - 1 and grad.numel():
            given = sampled(grad).to(working_dtype(grad.dtype), copy=True)
            self._given = given, given + sampled(held.before)
        self._steps += 1

    def end(self, held: Residual) -> None:
        """After it: what has come of that."""
        if self._given is None:
            return
        (grad, meant), kept = self._given, sampled(held.after)
        sent, unit = meant - kept, torch.dot(grad, grad)
        pairs = ((kept, kept), (meant, sent), (meant, meant), (sent, sent))
        log_gradient = unit.log() / 2 * (unit / unit)  # not finite where there is no gradient
        taken = torch.stack([log_gradient, *(torch.dot(a, b) / unit for a, b in pairs)])
        self._given = None
        self._look()
        self._arriving = Arriving(taken)

    def _look(self) -> None:
        """Take up the last sample, if it is finite: otherwise its step does not count."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None and all(map(math.isfinite, numbers := arriving.read())):
            self._newest = Sample(*numbers)
            self._seen = self._seen.and_then(self._newest)

    @property
    def newest(self) -> Sample | None:
        """The last sample; None before the first. May wait for a GPU."""
        self._look()
        return self._newest

    @property
    def here(self) -> Sample | None:
        """The last sample that has arrived; None before the first. Never waits."""
        if self._arriving is not None and self._arriving.arrived:
            self._look()
        return self._newest

    @property
    def residual_ratio(self) -> float | None:
        """Norm of what this rank holds back of the bucket over that of its gradient; None before the first sample."""
        return self.newest.ratio if self.newest else None

    @property
    def cosine(self) -> float | None:
        """The cosine between what this rank meant to send (gradient and residual) and what it sent; None as above."""
        return self.newest.cosine if self.newest else None

    @property
    def runs_away(self) -> bool:
        """True if error feedback of this rank diverges, by the samples that have arrived."""
        return self.here is not None and self._seen.runs_away


class Arriving:
    """Numbers on their way from the device to the host; only reading them may wait."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._event: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(numbers.get_device()))

    @property
    def arrived(self) -> bool:
        """True if reading would not wait."""
        return self._event is None or bool(self._event.query())

    def read(self) -> list[float]:
        """The numbers."""
        if self._event is not None:
            self._event.synchronize()
        return list(map(float, self._numbers.tolist()))


def sampled(flat: Tensor) -> Tensor:
    """Every so many of the elements."""
    return flat[:: stride(flat.numel())]


def stride(elements: int) -> int:
    """Every how many of so many elements a sample has: an odd number, so as not to meet the same column of each row."""
    return (elements // ELEMENTS) | 1


def gauges(state: Any) -> Iterator[Gauge]:
    """Yield the gauges in a compressor's state."""
    if isinstance(state, Gauge):
        yield state
    for _, part in parts(state):
        yield from gauges(part)
