"""The ranks that share a host: memory that those have in common, and barriers by counters in it."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..host_memory import mapped, memory_file, obstacle
from ..host_places import host_name
from ..lost_ranks import CHECK_SECONDS, Processes, extension, machine
from .wire import Wire

logger = logging.getLogger(__name__)
TEXT_BYTES = 128  # of what ranks tell each other
NOTHING = (0, 0, 1)  # a bucket without numbers
COUNTERS = 2  # that come with a bucket


def hosts_of(wire: Wire) -> list[list[int]]:
    """The ranks of each host, in order; a rank that cannot share memory has a host of its own. A collective call."""
    return _alike(wire, secrets.token_hex() if obstacle() else machine())


def has_neighbours(wire: Wire) -> bool:
    """Return True if any host has several ranks, whatever these can share. A collective call."""
    return len(_alike(wire, host_name())) < wire.size


def _alike(wire: Wire, name: str) -> list[list[int]]:
    """The ranks that pass the same name, in order."""
    groups: dict[str, list[int]] = {}
    for rank, each in enumerate(_gather(wire, hashlib.blake2s(name.encode()).hexdigest())):
        groups.setdefault(each, []).append(rank)
    return list(groups.values())


def _gather(wire: Wire, text: str) -> list[str]:
    """Return the short text of every rank, in rank order. A collective call."""
    texts = torch.empty(wire.size, TEXT_BYTES, dtype=torch.uint8)
    mine = torch.frombuffer(bytearray(text.encode().ljust(TEXT_BYTES)), dtype=torch.uint8)
    wire.wait(wire.gloo.allgather([list(texts.unbind())], [mine]))
    return [bytes(each.tolist()).decode().strip() for each in texts]


def shared_memory(wire: Wire, mates: Sequence[int], size: int) -> tuple[Any, Mapping[int, int]] | None:
    """Return `size` bytes that the ranks of each host, `mates`, have mapped: a file without a name, of their first rank.

    Also return the processes of those ranks. None, on all ranks, where any cannot. A collective call of all ranks. The
    memory is freed with the last rank that has mapped it.
    """
    file, address = None, ""
    try:
        if wire.rank == mates[0]:
            file, address = memory_file(size)
    except OSError as error:
        logger.info("rank %d has no memory for its host: %s", wire.rank, error)
    try:
        memory = _mapped(_gather(wire, address)[mates[0]], size, wire.rank)
        processes = _gather(wire, "" if memory is None else str(os.getpid()))  # by then all have opened the file
    finally:
        if file is not None:
            os.close(file)
    return (memory, {mate: int(processes[mate]) for mate in mates}) if all(processes) else None


def _mapped(address: str, size: int, rank: int) -> Any:
    """The memory at an address; None where there is none, or it is out of reach."""
    try:
        return mapped(address.split(), size) if address else None
    except OSError as error:
        logger.info("rank %d cannot map the memory of its host: %s", rank, error)
        return None


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
