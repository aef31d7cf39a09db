"""The number of tasks that are on their way at once on a CPU: a network is busy, and no more have payloads and work memory.

On CUDA the turns of `side_stream.py` limit them: a task ends so many tasks later as it has rounds.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate

FEWEST, MOST_BYTES = 3, 64 << 20  # tasks that may be on their way whatever their size; bytes of gradients of more
MODULES_IN_FLIGHT = 4  # of FSDP2, whose shards are on their way; each keeps the memory of all ranks' shards


def in_flight(nbytes: Sequence[int]) -> int:
    """Return how many of these tasks, in the order submitted, may be on their way at once; `nbytes`: of their gradients."""
    together = list(accumulate(nbytes))
    return max(min(FEWEST, len(together)), sum(total <= MOST_BYTES for total in together))


class InFlight:
    """The tasks that have begun and not ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tasks = self._bytes = 0

    def enter(self, nbytes: int, limit: float) -> None:
        """Wait until a task with so many bytes may begin. Raises RuntimeError where no task ends within `limit` seconds.

        The task counts in either case, until it leaves.
        """
        with self._changed:
            moves = True
            while moves and self._tasks >= FEWEST and self._bytes + nbytes > MOST_BYTES:
                moves = self._changed.wait(limit)
            self._tasks, self._bytes = self._tasks + 1, self._bytes + nbytes
        if not moves:
            raise RuntimeError(f"none of {self._tasks - 1} buckets that are on their way arrived within {limit:.0f} s")

    def leave(self, nbytes: int) -> None:
        """Note that a task has ended, however."""
        with self._changed:
            self._tasks, self._bytes = self._tasks - 1, self._bytes - nbytes
            self._changed.notify()
