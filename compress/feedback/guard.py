"""Error feedback that is damped, or suspended for dense steps, where it runs away."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels import Residual
from ..protocol.compressor import Compressor, Traits, with_traits
from ..protocol.layout import Layout, working_dtype
from ..protocol.requests import Program, all_reduce
from ..state.agreed import Agreed
from ..state.gauge import EVERY, Gauge, Sample, Seen, gauges
from ..state.tensors import Counter
from ..state.tree import Leaves

logger = logging.getLogger(__name__)
MODES = ("watching", "damping", "dense")
WATCHING, DAMPING, DENSE = range(3)
DAMPED_TO = 0.5  # of what is held back is left after each step
RELEASED = 0.125  # of it comes out in each dense step: all at once would be a gradient many times too large
FIRST_REST, LONGEST_REST = 4, 64  # samples that damping and dense steps last; the latter twice as long each time
SIZE, LARGEST = len(Sample._fields), 6e4  # numbers of a sample, and what 16 bits hold
NONE = -1.0  # in place of each of them, where there is no sample


class Mode(NamedTuple):
    """One of MODES, the samples left in it, and how often error feedback has run away so far."""

    now: int = WATCHING
    left: int = 0
    strikes: int = 0

    def following(self, *, runs_away: bool) -> Mode:
        """Return the mode of the next `EVERY` steps: damping the first time, dense steps later and where damping fails."""
        if runs_away and self.now != DENSE:
            rest = FIRST_REST * 2 ** max(0, self.strikes - 1)
            return Mode(DENSE if self.strikes else DAMPING, min(LONGEST_REST, rest), self.strikes + 1)
        if self.left > 1:
            return self._replace(left=self.left - 1)
        return Mode(WATCHING, 0, self.strikes)


@dataclass
class Verdict(Agreed):
    """The newest sample, what was seen before it, and the mode."""

    @classmethod
    def initial(cls, layout: Layout) -> Verdict:
        """Watching, with nothing seen."""
        numbers = [NONE] * SIZE + [*Seen(), *Mode()]
        return cls(layout, torch.tensor(numbers, dtype=torch.float32, device=layout.device))

    def read(self) -> tuple[Sample | None, Seen, Mode]:
        """Return the newest sample, what was seen before it, and the mode."""
        if self.flat.is_meta:
            return None, Seen(), Mode()
        numbers = self.numbers()
        sample, (samples, in_a_row, log_mean, *mode) = Sample(*numbers[:SIZE]), numbers[SIZE:]
        seen = Seen(int(samples), int(in_a_row), log_mean)
        return None if sample.held == NONE else sample, seen, Mode(*map(int, mode))

    def write(self, sample: Tensor | None, seen: Seen, mode: Mode) -> None:
        """Write all of it anew, as a part of the step."""
        after = self.update().after
        after[SIZE:].copy_(torch.tensor([*seen, *mode], dtype=after.dtype, device="cpu"), non_blocking=True)
        after[:SIZE] = NONE if sample is None else torch.where(sample.isfinite().all(), sample, NONE)
        self.bring(after)

    def demand(self, numbers: Tensor) -> float:
        """The most strikes."""
        return float(numbers[-1])


@dataclass
class GuardedState:
    """The layout, the steps seen, the ranks' agreement, and the inner state with its residuals."""

    layout: Layout
    step: Counter
    verdict: Verdict
    inner: Any
    held: Leaves
    gauge: Gauge


def agrees_in(step: int) -> bool:
    """Return True if the ranks agree anew in a step."""
    return step % EVERY == EVERY // 2


@with_traits(Traits(extra_rounds_in=agrees_in))
@dataclass(frozen=True)
class Guarded:
    """Damps error feedback for a while where it runs away; where it does so again, sends dense; and then tries anew.

    Once in `EVERY` steps the ranks average a few numbers about their residuals, each in units of its own gradient, so that
    all decide alike at the next such step. Dense steps bring out what is held back bit by bit, and lose nothing; damping
    forgets. The former last longer each time that they are needed.
    """

    inner: Compressor

    def init(self, layout: Layout) -> GuardedState:
        """Watching. Raises ValueError where there is no error feedback to watch."""
        inner = self.inner.init(layout)
        gauge = next(gauges(inner), None)
        if gauge is None:
            raise ValueError(f"a guard is for error feedback, and there is none in {self.inner}")
        gauge.guard = MODES[WATCHING]
        return GuardedState(layout, Counter(), Verdict.initial(layout), inner, Leaves(inner), gauge)

    def reduce(self, grad: Tensor, state: GuardedState, residual: Residual | None = None) -> Program[Tensor]:
        """The average, in the mode that the ranks have agreed on."""
        due = agrees_in(state.step.value)
        state.step.value += 1
        sample, seen, mode = state.verdict.read()
        if due:
            seen, mode = _judged(state, sample, seen, mode)
        state.gauge.due, state.gauge.guard = due, MODES[mode.now]
        if mode.now == DENSE:
            average = yield from _dense(grad, state, residual)
        else:
            average = yield from self.inner.reduce(grad, state.inner, residual)
        if mode.now == DAMPING:
            state.held.damp(DAMPED_TO)
        if due:
            mine = None if mode.now == DENSE else state.gauge.taken
            if mine is not None:  # not finite if some rank had no gradient
                mine = yield from all_reduce(mine.clamp(-LARGEST, LARGEST))
            state.verdict.write(mine, seen, mode)
        return average


def _judged(state: GuardedState, sample: Sample | None, seen: Seen, mode: Mode) -> tuple[Seen, Mode]:
    """Judge by the last sample, which all ranks have: return what was seen so far and the mode from here on."""
    seen = seen if sample is None else seen.and_then(sample)
    following = mode.following(runs_away=seen.runs_away)
    if following.now == mode.now:
        return seen, following
    if state.layout.ranks.rank == 0:
        _log(state.layout.names[0], sample, following)
    return seen._replace(in_a_row=0), following


def _log(name: str, sample: Sample | None, mode: Mode) -> None:
    bucket = f"error feedback of {name} and others in its bucket"
    if mode.now == WATCHING or sample is None:
        logger.info("%s: as usual again", bucket)
    else:
        told = MODES[mode.now], mode.left * EVERY
        logger.warning(
            "%s diverges: the residual is %.0fx the gradient. Now %s for %d steps", bucket, sample.ratio, *told
        )


def _dense(grad: Tensor, state: GuardedState, residual: Residual | None) -> Program[Tensor]:
    """The mean of gradients and of a part of what is held back, which is held back no more; all of an outer residual."""
    wide = grad.to(working_dtype(grad.dtype))
    if residual is not None:
        wide = wide + residual.before
        residual.after.zero_()
    state.held.release(state.layout, wide, RELEASED)
    average = yield from all_reduce(wide, exact=True)
    return average if average.dtype == grad.dtype else grad.copy_(average)
