"""All ranks of a benchmark, and the first so many of them as a process group of their own while the others wait."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..ranks.group import joined
from .rows import Placement

POLL_SECONDS = 0.2
HEARTBEAT, DONE = "beat", "done"


@dataclass(frozen=True)
class World:
    """This rank among all; they know each other by `store` alone, until some of them make a group.

    `local_ranks` and `hosts` are those of every rank: its place on its host, and the host's name.
    """

    store: dist.Store
    rank: int
    size: int
    backend: str
    device: torch.device
    timeout: timedelta
    local_ranks: Sequence[int]
    hosts: Sequence[str]

    def placement(self, count: int) -> Placement:
        """Return the placement of ranks 0 to `count` - 1: every host has one rank that is its first."""
        return Placement(count, max(1, list(self.local_ranks[:count]).count(0)))

    @contextmanager
    def joined(self, count: int, name: str) -> Iterator[None]:
        """The first `count` ranks, of which this is one, as torch's default process group, by a name not used before.

        The other ranks are in `wait` meanwhile; rank 0 calls `heartbeat` now and then.
        """
        place = {"store": dist.PrefixStore(name, self.store), "rank": self.rank, "world_size": count}
        with joined(self.backend, self.timeout, place):
            yield
        if self.rank == 0:
            self.store.set(f"{DONE}/{name}", "yes")

    def heartbeat(self, name: str, turn: int) -> None:
        """Tell those who wait that the ranks that measure are alive."""
        if self.rank == 0:
            self.store.set(HEARTBEAT, f"{name}/{turn}")

    def wait(self, name: str) -> None:
        """Wait for the ranks that measure. Raises RuntimeError where they make no turn within the time limit."""
        last, since = b"", time.monotonic()
        while not self.store.check([f"{DONE}/{name}"]):
            now = self.store.get(HEARTBEAT) if self.store.check([HEARTBEAT]) else b""
            if now != last:
                last, since = now, time.monotonic()
            if time.monotonic() - since > self.timeout.total_seconds():
                raise RuntimeError(f"rank {self.rank} waits for {name}, which made no progress within {self.timeout}")
            time.sleep(POLL_SECONDS)

    def leave(self) -> None:
        """End together: rank 0 may hold what the store of the others is connected to."""
        self.store.set(f"left/{self.rank}", "yes")
        if self.rank == 0:
            self.store.wait([f"left/{rank}" for rank in range(self.size)], self.timeout)


def join_world(
    rendezvous: dict[str, Any] | None, backend: str, device: torch.device, timeout: timedelta, about: tuple[int, str]
) -> World:
    """This rank and all others, once each has told its local rank and host; by a launcher's variables without
    `rendezvous`.
    """
    if rendezvous is None:
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    else:
        store, rank, size = rendezvous["store"], rendezvous["rank"], rendezvous["world_size"]
    store.set_timeout(timeout)
    store.set(f"about/{rank}", json.dumps(about))
    told = [json.loads(store.get(f"about/{other}")) for other in range(size)]
    local_ranks, hosts = zip(*told, strict=True)
    return World(store, rank, size, backend, device, timeout, local_ranks, hosts)
