"""A lock between the steps of a training and other threads, which save at any time and change things between two steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")
LOOK_EVERY = 0.02  # seconds from look to look at a step
QUIET = 10.0  # seconds without a sign of a step, after which it broke off


class StepLock:
    """Orders what threads do with a memory.

    `lock`: held while a step begins or ends, and while a thread takes a snapshot or makes a change. Two averagers whose
    steps end together share it. `thread`: id of the thread that began the current step. `waiting`: changes that other
    threads asked for during a step; its end makes them.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.thread = 0
        self.waiting: list[Callable[[], None]] = []

    def between_steps(self, change: Callable[[], None], *, under_way: bool) -> None:
        """Make a change now, or at the end of a step that is `under_way` on another thread. The caller holds the lock."""
        if under_way and self.thread != threading.get_ident():  # on this thread the step was interrupted
            self.waiting.append(change)
        else:
            change()

    def take(
        self,
        snapshot: Callable[[bool], T],
        under_way: Callable[[], bool],
        in_place: Callable[[], bool],
        signs: Callable[[], object],
    ) -> T:
        """Return the `snapshot` after the last step that ended, on any thread; its argument: a step is under way.

        Where that step overwrites numbers, `in_place`, and runs on another thread, the snapshot is of its end. `signs`: as
        for `after_step`.
        """
        with self.lock:
            elsewhere = self.thread != threading.get_ident()
            if not (under_way() and elsewhere and in_place()):
                return snapshot(under_way())
        found = self.after_step(lambda: snapshot(False), lambda: not under_way(), signs)
        if found is not None:
            return found
        with self.lock:  # the step broke off
            return snapshot(under_way())

    def after_step(self, take: Callable[[], T], ends: Callable[[], bool], signs: Callable[[], object]) -> T | None:
        """Return what `take` gives once the step is over that is under way on another thread; None if that broke off.

        `ends`: whether the step has ended. `signs`: what changes while it goes on. The thread that runs the step, or begins
        the next one, calls `take`; where neither comes, this one does. The caller does not hold the lock.
        """
        found: Future[T] = Future()

        def act() -> None:
            try:
                found.set_result(take())
            except BaseException as error:  # whoever waits raises it, not the training thread
                found.set_exception(error)

        with self.lock:
            self.waiting.append(act)
        sign, since = signs(), time.monotonic()
        while not wait([found], LOOK_EVERY).done:
            now = signs()
            sign, since = (sign, since) if now == sign else (now, time.monotonic())
            with self.lock:
                if ends() and act in self.waiting:
                    self.waiting.remove(act)  # the changes of others are for whoever begins the next step
                    act()
                elif time.monotonic() - since > QUIET and act in self.waiting:
                    self.waiting.remove(act)
                    return None
        return found.result()

    def make_changes(self) -> None:
        """Make the changes that other threads asked for. The caller holds the lock."""
        while self.waiting:
            self.waiting.pop(0)()
