"""A lock between the steps of a training and other threads, which save at any time and change things between two steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Protocol, TypeVar

T = TypeVar("T")
LOOK_EVERY = 0.02  # seconds from look to look at a step
QUIET = 10.0  # seconds without a sign of a step, after which it broke off


class Steps(Protocol):
    """The steps that a lock orders: a `CompressedAverager`, or a `ShardAverager`."""

    @property
    def under_way(self) -> bool:
        """True if a step has begun and not ended."""

    @property
    def overwrites(self) -> bool:
        """True if the step that is under way overwrites numbers of the step before, and may come to its end."""

    def signs(self) -> object:
        """Return what changes while a step goes on."""


class StepLock:
    """Orders what threads do with a memory.

    `lock`: held while a step begins or ends, and while a thread takes a snapshot or makes a change. Two averagers whose
    steps end together share it. `thread`: id of the thread that began the current step. `waiting`: what other threads
    asked for during a step: its end does it, or the beginning of the next one.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.thread = 0
        self.waiting: list[Callable[[], None]] = []

    def between_steps(self, steps: Steps, change: Callable[[], None]) -> None:
        """Make a change now, or at the end of a step that runs on another thread."""
        with self.lock:
            if self._is_elsewhere(steps):
                self.waiting.append(change)
            else:
                change()

    def take(self, steps: Steps, snapshot: Callable[[bool], T]) -> T:
        """Return the `snapshot` after the last step that ended, on any thread; its argument: a step is under way.

        If a step of another thread overwrites numbers, the snapshot is of the end of that step. Then the thread of the
        step takes it, at the end of the step or before the next one. This thread takes it if the other one comes to
        neither, or if the step breaks off. The caller does not hold the lock.
        """
        with self.lock:
            if not (self._is_elsewhere(steps) and steps.overwrites):
                return snapshot(steps.under_way)
            found: Future[T] = Future()
            save = partial(_take_between_steps, snapshot, found)
            self.waiting.append(save)
        sign, since = steps.signs(), time.monotonic()
        while not wait([found], LOOK_EVERY).done:
            if (now := steps.signs()) != sign:
                sign, since = now, time.monotonic()
            with self.lock:
                under_way = steps.under_way
                broke_off = time.monotonic() - since > QUIET
                if save in self.waiting and (broke_off or not under_way):
                    self.waiting.remove(save)  # the changes of others are for whoever begins the next step
                    return snapshot(under_way)
        return found.result()

    def _is_elsewhere(self, steps: Steps) -> bool:
        """Return True if a step is under way on another thread. One on this thread was interrupted."""
        return steps.under_way and self.thread != threading.get_ident()

    def make_changes(self) -> None:
        """Do what other threads asked for. The caller holds the lock."""
        while self.waiting:
            self.waiting.pop(0)()


def _take_between_steps(snapshot: Callable[[bool], T], found: Future[T]) -> None:
    """Take a snapshot for the thread that waits for it, which raises what this raises."""
    try:
        found.set_result(snapshot(False))
    except BaseException as error:
        found.set_exception(error)
