"""The steps of a handle: which one is under way, and what other threads may do between two of them, or beside one."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from enum import Enum, auto
from typing import TypeVar

import torch.distributed as dist

from ..measure.stats import Stats, Totals
from ..measure.step import Step
from ..memory.rescaled_residuals import LossScale
from ..memory.step_memory import StepMemory
from ..transport.protocol import Decorator
from .engines import Engines
from .shown_averages import Shown
from .step_checks import DiscardedGradientCheck

logger = logging.getLogger(__name__)

T = TypeVar("T")
QUIET = 10.0  # seconds without a sign of a step, after which it broke off


class Phase(Enum):
    """The phases of a step: IDLE > OPEN > IDLE where its end is told, and IDLE > OPEN > SENT > IDLE under torch's hook.

    torch's DDP tells a hook neither that a step ends nor that a backward broke off. There a step is over once its last
    bucket was sent and no program runs any more. One that broke off stays OPEN until the next one begins; for a save that
    waits it is OPEN > BROKEN, and OPEN again if it goes on after all.
    """

    IDLE = auto()  # no step is under way
    OPEN = auto()  # one has begun
    SENT = auto()  # all of its buckets were sent
    BROKEN = auto()  # no sign of it was seen for QUIET seconds


class Steps:
    """The steps of a handle, of which one at most is under way, and the lock that orders what threads do with memories.

    There is one for each handle; the two averagers of hybrid sharding share it. `lock` is held while a step begins or ends,
    and while a thread takes a snapshot or makes a change. `averagers` take part in steps. `scaler`: residuals follow its
    scale when a step begins.
    """

    def __init__(self) -> None:
        self.lock = threading.Condition(threading.RLock())
        self.phase = Phase.IDLE
        self.scaler: LossScale | None = None
        self.averagers = weakref.WeakSet[SteppedAverager]()
        self._thread = 0  # id of the thread that began the step
        self._heard = 0.0  # when an engine had nothing left to do
        self._broke = 0.0  # when the step was found BROKEN
        self._waiting: list[Callable[[], None]] = []  # asked for by other threads during a step

    def begin(self) -> None:
        """Open a step, behind what other threads asked for. One that is still OPEN broke off; one that is SENT is over."""
        with self.lock:
            if self.phase is not Phase.IDLE:
                self.phase = Phase.IDLE
                for averager in self.averagers:
                    if self._waiting and averager.inside:
                        averager.memory.commit()  # as this step will, but before what waits: a save would find it half done
                    averager.inside = False
            if self._waiting:
                self._make_changes()
            if self.scaler is not None:  # after a load, which forgets the loss scale
                self.scaler.follow()
            self.phase, self._thread = Phase.OPEN, threading.get_ident()

    def all_sent(self) -> None:
        """All buckets of the step were sent. It is over when their programs are."""
        with self.lock:
            if self.phase is not Phase.IDLE:
                self.phase = Phase.SENT
                self.lock.notify_all()

    def end(self) -> None:
        """End the step: all of its averages have been handed out."""
        with self.lock:
            self._over()
            if self._waiting:
                self._make_changes()

    def leave(self, averager: SteppedAverager) -> None:
        """Take this averager out of the step that is under way: its memory was replaced, what the step writes is lost."""
        with self.lock:
            averager.inside = False
            if not any(each.inside for each in self.averagers):
                self.phase = Phase.IDLE
                self.lock.notify_all()

    def holds(self, averager: SteppedAverager) -> bool:
        """Return True if a step of this averager is under way, or broke off."""
        with self.lock:
            self._update_phase()
            return averager.inside

    def hear(self) -> None:
        """An engine has nothing left to do."""
        self._heard = time.perf_counter()
        if self._waiting:
            with self.lock:
                self.lock.notify_all()

    def between(self, change: Callable[[], None]) -> None:
        """Make a change now, or when the step of another thread is over. One of this thread was interrupted, and is over."""
        with self.lock:
            if self._elsewhere():
                self._waiting.append(change)
                return
            if self.phase is Phase.IDLE:  # the step has ended that earlier ones wait for
                self._make_changes()
            change()

    def snapshot(self, take: Callable[[], T]) -> T:
        """Return what `take` returns of the memories after the last step that ended; on any thread.

        If a step of another thread overwrites numbers, it is taken at that step's end, by the thread of the step. This
        thread takes it if no end comes. The caller does not hold the lock.
        """
        with self.lock:
            taken = self._await_end(take) if self._elsewhere() and self._overwrites() else take()
        for averager in self.averagers:
            averager.engines.follow()
        return taken

    def _await_end(self, take: Callable[[], T]) -> T:
        asked: Future[T] = Future()

        def save() -> None:
            try:
                asked.set_result(take())
            except BaseException as error:  # raised in the thread that waits
                asked.set_exception(error)

        self._waiting.append(save)
        since = time.perf_counter()
        while not asked.done() and self._elsewhere() and self._overwrites() and self.phase is not Phase.BROKEN:
            if (quiet := time.perf_counter() - max(since, self._last_sign())) < QUIET:
                self.lock.wait(QUIET - quiet)
            else:
                self.phase, self._broke = Phase.BROKEN, time.perf_counter()
        if asked.done():
            return asked.result()
        # nobody tells torch's hook that a step is over: what was asked for during it is due
        if self.phase is Phase.IDLE:
            self._make_changes()
            return asked.result()
        self._waiting.remove(save)  # the changes of others are for whoever begins the next step
        return take()

    def _last_sign(self) -> float:
        """Return when a program last began, ended or ran, unless one has failed."""
        here = list(self.averagers)
        if any(each.engines.runs and not each.engines.failed for each in here):
            return time.perf_counter()
        return max([self._heard, *(cost.given for each in here for cost in each.step.costs[-1:])])

    def _overwrites(self) -> bool:
        """Return True if a step overwrites numbers of the step before, and may come to its end."""
        here = list(self.averagers)
        return any(each.memory.in_place for each in here) and not any(each.engines.failed for each in here)

    def _elsewhere(self) -> bool:
        self._update_phase()
        return self.phase is not Phase.IDLE and self._thread != threading.get_ident()

    def _update_phase(self) -> None:
        """End a step that is over but whose end nobody tells, or reopen one that goes on and seemed to be broken."""
        if self.phase is Phase.SENT and all(each.engines.idle for each in self.averagers):
            self._over()
        elif self.phase is Phase.BROKEN and self._last_sign() > self._broke:
            self.phase = Phase.OPEN

    def _over(self) -> None:
        for averager in self.averagers:
            if averager.inside:
                averager.inside = False
                averager.step_is_over()
        self.phase = Phase.IDLE

    def _make_changes(self) -> None:
        """Do what other threads asked for. The caller holds the lock."""
        while self._waiting:
            self._waiting.pop(0)()
            self.lock.notify_all()


class SteppedAverager:
    """An averager as far as its steps go: engines, what programs cost, and a memory that each step changes as a whole."""

    memory: StepMemory

    def __init__(
        self, groups: Sequence[dist.ProcessGroup], timeout: timedelta | None, decorate: Decorator | None, steps: Steps
    ) -> None:
        self.engines = Engines(groups, timeout, decorate, steps.hear)
        self.steps, self.totals, self.shown, self.discarded = steps, Totals(), Shown(), DiscardedGradientCheck()
        self.step = Step()  # the record of the last one
        self.inside = False  # it takes part in the step that is under way
        self._advised: set[str] = set()
        steps.averagers.add(self)

    @property
    def steps_begun(self) -> int:
        """Steps since construction."""
        return self.engines.agreement.step

    @property
    def under_way(self) -> bool:
        """True if a step has begun and not ended, as far as is known."""
        return self.steps.holds(self)

    def log_advice(self, sentences: Iterable[str]) -> None:
        """Log each sentence once, on the first rank. Every rank asks for them: none raises alone."""
        for found in sentences:
            if found not in self._advised and self.engines.first:
                self._advised.add(found)
                logger.warning("gradwire: %s", found)

    def step_is_over(self) -> None:
        """Note the end of a step that this averager has entered, where anybody knows it. The caller holds the lock."""

    def between_steps(self, change: Callable[[], None]) -> None:
        """Change the memory now, or when the step is over that runs on another thread."""
        self.steps.between(change)

    def stats(self) -> Stats:
        """Return what the last step cost, and all of them."""
        return self.totals.stats(self.step, self.memory.step)

    def close(self) -> None:
        """End the threads and process groups that were made; training with it is over."""
        self.engines.close()
