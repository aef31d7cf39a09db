"""How far the ranks of a host have come, counted in memory that they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..processes import Processes, extension
from ..shared_buffer import LOOK_SECONDS
from .wire import Wire

NOTHING = (0, 0, 1)  # a bucket without numbers
PLACES = 2  # that come with a bucket


class Mates:
    """What all ranks of a host come to, and wait there for each other: places, each of which they come to in turns.

    `processes`: of each rank of the host, in order. `memory`: zeros, the first `header_bytes` of which are for this.
    RuntimeError where one of them is gone.
    """

    def __init__(self, wire: Wire, processes: Mapping[int, int], memory: Any, places: int) -> None:
        self._wire, self._ranks = wire, list(processes)
        mine, buckets = self._ranks.index(wire.rank), [NOTHING] * _buckets(places)
        self._counters = extension().SharedShares([memory] * len(processes), mine, buckets)
        try:
            self._processes = Processes({rank: each for rank, each in processes.items() if rank != wire.rank})
        except OSError as error:
            raise RuntimeError(f"a rank of this host has ended, and its connections with it: {error}") from error

    def come(self, place: int) -> None:
        """This rank comes to a place."""
        self._counters.arrive(place)

    def wait(self, place: int) -> None:
        """Until all have come to a place as often as this one; RuntimeError where one is gone, or at the time limit."""
        ended: list[int] = []
        while not self._counters.wait(place, min(LOOK_SECONDS, self._wire.seconds_left())):
            if (mate := self._counters.given_up()) >= 0:
                raise RuntimeError(f"rank {self._ranks[mate]} has closed its connections; see what it raised")
            if ended:
                raise RuntimeError(f"rank {ended[0]} has ended, and its connections with it")
            if not self._wire.seconds_left():
                missing = [self._ranks[mate] for mate in self._counters.missing(place)]
                raise RuntimeError(f"timed out: ranks {missing} have not come as far as their host's others")
            ended = self._processes.ended()  # it may have come before that: one more look


def header_bytes(ranks: int, places: int) -> int:
    """Of the memory of so many ranks, which have so many places."""
    size: int = extension().SharedShares.header_bytes(_buckets(places), ranks)
    return size


def _buckets(places: int) -> int:
    return -(-places // PLACES)
