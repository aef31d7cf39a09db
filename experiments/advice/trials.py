"""Trials behind a recommendation: some steps of a copy of the training, on gradwire's DistributedDataParallel."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import TypeVar

from ...ddp_core import Decorator, DistributedDataParallel, exchange, over
from ...ddp_core.measure.clock import clock_of
from ...ddp_core.overlap.overlapped_optimizer import OverlappedOptimizer
from ...ddp_core.transport.private_group import known_group
from ...hooks.overlap import overlap
from .candidates import BACKWARD, PRIORITY
from .rank_group import RankGroup
from .recommendation import Forecast
from .rule import Choice, Rule
from .timed_training import Training

TRIAL_SECONDS = 40.0
SETTLED = {BACKWARD: 3, PRIORITY: 12}  # steps, after which buckets and what is sent first stay as they are
RIVAL = 1.1  # times the best step: what is predicted to be nearer may be better
FEWEST_TRIED, MOST_TRIED = 4, 20  # measured steps of a trial
FIRST, FAR = 2, 4.0  # so many steps tell whether they take so many times what was predicted: then few more do
WANTED = 1.0  # seconds of them
PATIENCE, PATIENT_STEPS = timedelta(seconds=20), 20  # of a trial's waits for other ranks

T = TypeVar("T")


@dataclass(frozen=True)
class Tried:
    """The result of a trial, the same on all ranks: seconds of a step, or else what failed; and the seconds that it took."""

    step: float | None
    spent: float
    failure: str = ""


Run = Callable[[Choice, int], Tried]  # a choice and how many steps to measure


def checked_seconds(seconds: float) -> None:
    """Raise ValueError where trials cannot take so long."""
    if not 0 <= seconds < math.inf:
        raise ValueError(f"trial_seconds is how long steps may be tried, at least 0 (not at all), got {seconds}")


class TrialFailed(Exception):
    """A trial failed on some rank; the message is the same on all of them."""


def confirmed(forecast: Forecast, rule: Rule, run: Run, seconds: float) -> tuple[Forecast, list[str]]:
    """The forecast after trials of the choice that it recommends, of what that is compared with, of what may be as fast, of
    none, and of the compressor that is predicted to be the fastest.

    Where a trial has another one recommended, that is tried, too, until `seconds` are over; then the best of those that were
    tried is. A choice whose trial fails is left out; by priority all that is so, where none of that had worked before. With
    the forecast come the failures; after one of none in backward's order, which is the training's own, it is as it was.
    """
    predicted, failures = forecast, list[str]()
    while choice := _next(forecast, rule, seconds, failed=bool(failures)):
        tried = run(choice, measured_steps(choice))
        seconds -= tried.spent
        if tried.step is not None:
            forecast = forecast.tried(choice, tried.step, rule)
            continue
        failures.append(f"{choice.name}: {tried.failure}")
        if choice.is_none:
            return predicted, failures
        by_priority = [each for each in forecast.choices if each.order == PRIORITY]
        out = {(choice.spec, choice.order)}
        if choice.order == PRIORITY and not any(each.tried for each in by_priority):
            out |= {(each.spec, each.order) for each in by_priority}
        forecast = forecast.only(forecast.rows - out, rule)
    return forecast.of_tried(rule), failures


def _next(forecast: Forecast, rule: Rule, seconds: float, *, failed: bool) -> Choice | None:
    """Return the next choice worth trying in the time left, if any. `failed`: something did, maybe the training itself."""
    best, kept, none = forecast.best, rule.kept(forecast.choices), forecast.of("none")
    rivals = [each for each in kept if each.step <= RIVAL * best.step]
    below = rule.ladder(forecast.choices)[::-1]  # what the best one is worth it over, at last none
    others = [each for each in kept if each.spec != "none"]  # not none alone, though it be faster than was predicted
    fastest = sorted(others, key=lambda each: each.prediction.step)[:1]
    wanted = [none] * failed + [best, *below[:-1], rule.plain(forecast.choices), *rivals, none, *fastest]
    return next((each for each in wanted if each.tried is None and cost(each) <= seconds), None)


def measured_steps(choice: Choice) -> int:
    """Return the number of steps of a trial that are measured."""
    return max(FEWEST_TRIED, min(MOST_TRIED, round(WANTED / choice.step)))


def cost(choice: Choice) -> float:
    """Seconds that a trial would take, as far as predictions tell."""
    return choice.step * (measured_steps(choice) + SETTLED[choice.order])


def _let_go(error: BaseException | None) -> None:
    """Free what an error's tracebacks hold: a trial's connections, and futures of torch's that hold the error in turn."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class Trials:
    """Trainings of copies, made by `copied`. `unused`: some parameters get no gradient."""

    def __init__(
        self,
        here: RankGroup,
        copied: Callable[[], Training],
        bucket_mb: float | None,
        transport: Decorator | None,
        timeout: timedelta,
        *,
        unused: bool,
    ) -> None:
        self._here, self._copied, self._timeout = here, copied, timeout
        self._wrapped = partial(
            DistributedDataParallel,
            bucket_cap_mb=bucket_mb,
            find_unused_parameters=unused,
            transport=transport,
            forward_sync_buffers=False,
        )

    def step(self, choice: Choice, steps: int) -> Tried:
        """The mean over ranks of the median of so many steps."""
        began, step, failure = time.perf_counter(), None, ""
        try:
            training = self._on_all(self._copied)
            mine = self._on_all(partial(self._trained, training, choice, steps))
            step = float(statistics.mean(self._here.gather(mine)))
        except TrialFailed as error:
            failure = str(error)
        return Tried(step, max(self._here.gather(time.perf_counter() - began)), failure)

    def _on_all(self, function: Callable[[], T]) -> T:
        """Return the function's result. Raises TrialFailed on all ranks if any raised, once the others' waits have ended."""
        results, failure = list[T](), ""
        try:
            results.append(function())
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            _let_go(error)
        gc.collect()  # a copy that is over would stay beside the next one
        if failures := [f"rank {rank}: {text}" for rank, text in enumerate(self._here.gather(failure)) if text]:
            raise TrialFailed("; ".join(failures))
        return results[0]

    def _trained(self, training: Training, choice: Choice, steps: int) -> float:
        limit = min(self._timeout, PATIENCE + timedelta(seconds=PATIENT_STEPS * choice.step))
        with known_group(self._here.messages, limit, self._here.device) as group:  # reports have their own
            model = self._wrapped(
                training.model,
                process_group=group,
                compressor=choice.spec,
                optimizer=training.optimizers,
                timeout=limit,
            )
            try:
                return self._measured(model, training, choice, steps)
            finally:
                model.compression.close()

    def _measured(self, model: DistributedDataParallel, training: Training, choice: Choice, steps: int) -> float:
        clock = clock_of(self._here.device)
        if choice.order == PRIORITY:
            overlap(model, training.optimizers, order=PRIORITY)
        marks = [clock.now()]

        def train(count: int) -> float:
            for _ in range(count):
                training.step_through(model)
                marks.append(clock.now())
            for each in training.optimizers:
                if isinstance(each, OverlappedOptimizer):
                    each.drain()
            clock.synchronize()
            return clock.seconds(marks[-2], marks[-1])

        slowest = max(map(float, exchange(str(train(FIRST)), over(model.process_group, self._here.device))))
        far = slowest > FAR * choice.step
        steps = min(steps, FEWEST_TRIED) if far else steps
        train(steps + (0 if far else SETTLED[choice.order] - FIRST))
        return statistics.median(clock.seconds(begin, end) for begin, end in pairwise(marks[-steps - 1 :]))
