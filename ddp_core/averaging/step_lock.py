"""A lock between the steps of a training and other threads, which save at any time and change things between two steps."""

from __future__ import annotations

import threading
from collections.abc import Callable


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

    def make_changes(self) -> None:
        """Make the changes that other threads asked for. The caller holds the lock."""
        while self.waiting:
            self.waiting.pop(0)()
