"""Messages between two ranks of a group, over a Gloo that nobody else uses."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

SHORTEST = 0.001  # seconds of a wait; Gloo takes 0 for no limit
TAG = 0  # one for all: messages differ by their order


class Wire:
    """Sends and receives of one rank. One thread at a time; messages between two ranks keep their order.

    `gloo`: the same ranks' collectives, for that thread too. Making one is a collective call.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)  # torch's types do not list what it can do
        self._deadline = 0.0

    def limit(self, timeout: timedelta) -> None:
        """Have all waits from now on end within `timeout`."""
        self._deadline = time.monotonic() + timeout.total_seconds()

    def seconds_left(self) -> float:
        """Until waits end."""
        return max(0.0, self._deadline - time.monotonic())

    def send(self, tensor: Tensor, rank: int) -> dist.Work:
        """Begin to send a contiguous tensor, which is to stay as it is until this was waited for."""
        work: dist.Work = self.gloo.send([tensor], rank, TAG)
        return work

    def receive(self, tensor: Tensor, rank: int) -> dist.Work:
        """Begin to receive into a contiguous tensor of the size that was sent."""
        work: dist.Work = self.gloo.recv([tensor], rank, TAG)
        return work

    def wait(self, work: dist.Work) -> None:
        """Wait for a work, once; RuntimeError where the rank is gone, or at the time limit."""
        work.wait(timedelta(seconds=max(SHORTEST, self.seconds_left())))

    def wait_all(self, works: Iterable[dist.Work]) -> None:
        """Wait for each."""
        for work in works:
            self.wait(work)

    def close(self) -> None:
        """End the connections once no work is left, which other ranks learn of; it may be called again."""
        self.gloo = None
