"""What a recommendation rests on, tried: some steps of a copy of the training, as the line to paste would have them."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import pairwise

from ...ddp_core import Decorator, DistributedDataParallel, overlap
from ...ddp_core.schedule.overlapped_optimizer import OverlappedOptimizer
from ..clock import clock_for
from .advice import Choice, Forecast, Rule
from .candidates import BACKWARD, PRIORITY
from .here import Here
from .training import Training

TRIAL_SECONDS = 40.0
SETTLED = {BACKWARD: 3, PRIORITY: 12}  # steps, after which buckets and what is sent first stay as they are
RIVAL = 1.1  # times the best step: what is told to be nearer may be better
FEWEST, MOST = 4, 20  # measured steps
WANTED = 1.0  # seconds of them

Run = Callable[[Choice, int], float]  # a choice and measured steps: seconds of each, the same on all ranks


def checked_seconds(seconds: float) -> None:
    """Raises ValueError where trials cannot take so long."""
    if not 0 <= seconds < math.inf:
        raise ValueError(f"trial_seconds is how long steps may be tried, at least 0 (not at all), got {seconds}")


def confirmed(forecast: Forecast, rule: Rule, run: Run, seconds: float) -> tuple[Forecast, str]:
    """The forecast after trials of the choice that it recommends, of what that is compared with, of what may be as fast, and
    of none.

    Where a trial has another one recommended, that is tried, too, until `seconds` are over. A choice whose trial fails is
    not recommended; with the forecast comes what was raised. Without overlap it is the training that fails, and the
    forecast stays with predictions.
    """
    failure = ""
    while True:
        best, kept = forecast.best, rule.kept(forecast.choices)
        rivals = (each for each in kept if each.step <= RIVAL * best.step)
        wanted = (best, rule.plain(forecast.choices), *rivals, forecast.of("none"))
        choice = next((each for each in wanted if each.tried is None and cost(each) <= seconds), None)
        if choice is None:
            return forecast, failure
        steps = measured_steps(choice)
        try:
            tried = run(choice, steps)
        except Exception as error:
            failure = f"{choice.name}: {type(error).__name__}: {error}"
            if choice.order == BACKWARD:
                return forecast, failure
            backward = (each for each in forecast.choices if each.order == BACKWARD)
            forecast = Forecast.ranked(forecast.ranks, forecast.per_host, backward, rule)
        else:
            seconds -= tried * (steps + SETTLED[choice.order])
            forecast = forecast.tried(choice, tried, rule)


def measured_steps(choice: Choice) -> int:
    """How many steps of a trial are measured."""
    return max(FEWEST, min(MOST, round(WANTED / choice.step)))


def cost(choice: Choice) -> float:
    """Seconds that a trial would take, as far as predictions tell."""
    return choice.step * (measured_steps(choice) + SETTLED[choice.order])


class Trials:
    """Trainings of copies, made by `copied`. `unused`: some parameters get no gradient."""

    def __init__(
        self,
        here: Here,
        copied: Callable[[], Training],
        bucket_mb: float | None,
        transport: Decorator | None,
        timeout: timedelta,
        *,
        unused: bool,
    ) -> None:
        self._here, self._copied = here, copied
        self._wrapped = partial(
            DistributedDataParallel,
            process_group=here.group,
            bucket_cap_mb=bucket_mb,
            find_unused_parameters=unused,
            transport=transport,
            timeout=timeout,
        )

    def step(self, choice: Choice, steps: int) -> float:
        """Seconds, the mean over ranks of the median of so many steps. Raises what fails on any rank, on all of them."""
        mine = self._here.tried(partial(self._trained, choice, steps))
        gc.collect()  # or the next copy would come on top of this one
        return float(statistics.mean(self._here.told(mine)))

    def _trained(self, choice: Choice, steps: int) -> float:
        training, clock = self._copied(), clock_for(self._here.device)
        model = self._wrapped(training.model, compressor=choice.spec, optimizer=training.optimizer)
        try:
            optimizer = training.optimizer
            if choice.order == PRIORITY:
                optimizer = overlap(model, optimizer, order=PRIORITY)
            marks = []
            for _ in range(SETTLED[choice.order] + steps + 1):
                marks.append(clock.mark())
                training.step_through(model)
            if isinstance(optimizer, OverlappedOptimizer):
                optimizer.drain()
            clock.synchronize()
        finally:
            model.compression.close()
        return statistics.median(clock.seconds(begin, end) for begin, end in pairwise(marks[-steps - 1 :]))
