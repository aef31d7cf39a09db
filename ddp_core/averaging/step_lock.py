"""A lock between a training's steps and other threads, which save at any time and change things between two steps."""

from __future__ import annotations

import threading
from collections.abc import Callable


class StepLock:
    """Held while a step begins or ends, and while a thread takes a snapshot of the memory or changes it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # replaced where two averagers have their steps in common
        self._thread = 0  # id of the thread that began the current step
        self._waiting: list[Callable[[], None]] = []  # changes that another thread wants, for the end of the step

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def begin(self) -> None:
        """Note that the current thread begins a step."""
        self._thread = threading.get_ident()

    def between_steps(self, change: Callable[[], None], *, under_way: bool) -> None:
        """Make a change now, or at the end of a step that is `under_way` on another thread. The caller holds the lock."""
        if under_way and self._thread != threading.get_ident():  # on this one it broke off
            self._waiting.append(change)
        else:
            change()

    def make_changes(self) -> None:
        """Make the changes that other threads wanted in the middle of a step. The caller holds the lock."""
        while self._waiting:
            self._waiting.pop(0)()
