"""The barriers of a host's ranks, by counters in memory that they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..processes import CHECK_SECONDS, Processes, extension
from .wire import Wire

NOTHING = (0, 0, 1)  # a bucket without numbers
COUNTERS = 2  # that come with a bucket


class HostBarrier:
    """Barriers of a host's ranks, one for each counter, used again and again.

    `processes`: of each rank of the host, in order. `memory`: zeros, the first `header_bytes` of which are for this.
    RuntimeError where one of them is gone.
    """

    def __init__(self, wire: Wire, processes: Mapping[int, int], memory: Any, counters: int) -> None:
        self._wire, self._ranks = wire, list(processes)
        mine, buckets = self._ranks.index(wire.rank), [NOTHING] * _buckets(counters)
        self._counters = extension().SharedShares([memory] * len(processes), mine, buckets)
        try:
            self._processes = Processes({rank: each for rank, each in processes.items() if rank != wire.rank})
        except OSError as error:
            raise RuntimeError(f"a rank of this host has ended, and its connections with it: {error}") from error

    def arrive(self, counter: int) -> None:
        """This rank arrives, once more."""
        self._counters.arrive(counter)

    def wait(self, counter: int) -> None:
        """Until all have arrived as often as this rank; RuntimeError where one is gone, or at the time limit."""
        ended: list[int] = []
        while not self._counters.wait(counter, min(CHECK_SECONDS, self._wire.seconds_left())):
            if (mate := self._counters.given_up()) >= 0:
                raise RuntimeError(f"rank {self._ranks[mate]} has closed its connections; see its error")
            if ended:
                raise RuntimeError(f"rank {ended[0]} has ended, and its connections with it")
            if not self._wire.seconds_left():
                missing = [self._ranks[mate] for mate in self._counters.missing(counter)]
                raise RuntimeError(f"timed out: ranks {missing} have not come as far as their host's others")
            ended = self._processes.ended()  # it may have arrived before that: one more look

    def close(self) -> None:
        """Have whoever waits for this rank raise."""
        self._counters.give_up()


def header_bytes(ranks: int, counters: int) -> int:
    """Return the bytes of the header of memory that `ranks` ranks share, with `counters` counters."""
    size: int = extension().SharedShares.header_bytes(_buckets(counters), ranks)
    return size


def _buckets(counters: int) -> int:
    return -(-counters // COUNTERS)
