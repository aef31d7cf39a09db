"""The ranks that there are: where they run, and what they tell each other."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...compress import Ranks
from ...ddp_core import Transport, exchange, over
from ...ddp_core.transport import host_places
from ...ddp_core.transport.lost_ranks import BOOT

T = TypeVar("T")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class RankGroup:
    """The ranks' group, this one's device, their hosts, and how many cores of its machine a rank has; on all ranks alike but
    for the device.

    `ranks`: as the first rank sees them, so they are alike on all. `one_host`: real links go within a host alone.
    """

    group: dist.ProcessGroup
    device: torch.device
    ranks: Ranks
    cores: float
    one_host: bool

    @classmethod
    def found(cls, group: dist.ProcessGroup, device: torch.device, *, one_level: bool) -> RankGroup:
        """A collective call. `one_level`: every rank counts as a host, whatever machine it is on."""
        size = group.size()
        texts = exchange(json.dumps(_place()), over(group, device), what="their hosts and cores")
        places = [json.loads(text) for text in texts]
        cores = 1.0 if device.type == "cuda" else cores_each([(machine, own) for _, machine, own in places])
        one_host = not one_level and len({host for host, _, _ in places}) == 1
        try:
            per_host = 1 if one_level else host_places.ranks_per_host(over(group, device), device)
        except ValueError:  # hosts of different sizes, which two levels do not take either
            per_host = 1
        return cls(group, device, Ranks(size, per_host=per_host if per_host < size else 1), cores, one_host)

    @property
    def messages(self) -> Transport:
        """Return the transport of messages among the ranks."""
        return over(self.group, self.device)

    @property
    def selected(self) -> AbstractContextManager[Any]:
        """Has the device be the current one, which on CUDA may still be another."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, of what JSON can say. A collective call."""
        return [json.loads(text) for text in exchange(json.dumps(value), self.messages)]

    def free_memory(self) -> int | None:
        """Return the bytes that are free for the rank with the least memory; None if a system does not report them.

        The ranks of a machine share its memory in equal parts. A collective call.
        """
        told = self.gather([_place()[1], free_bytes(self.device)])
        machines = [machine if self.device.type == "cpu" else rank for rank, (machine, _) in enumerate(told)]
        pairs = zip(machines, told, strict=True)
        free = [left // machines.count(at) for at, (_, left) in pairs if left is not None]
        return min(free) if len(free) == len(told) else None

    def tried(self, function: Callable[[], T]) -> T:
        """`tried` on these ranks."""
        return tried(function, self.messages)


def tried(function: Callable[[], T], messages: Transport) -> T:
    """Return the function's result here, once it has returned on every rank. A collective call.

    Raises what it raised here; where it raised on others alone ValueError, which names the first of them.
    """
    try:
        result = function()
    except Exception as error:
        exchange(f"{type(error).__name__}: {error}", messages)
        raise
    for rank, failure in enumerate(exchange("", messages)):
        if failure:
            raise ValueError(f"steps cannot be tried on rank {rank}, so no rank gets advice: {failure}")
    return result


def _place() -> tuple[str, str, list[int]]:
    """This process's host, machine, and the cores of it that it may run on."""
    machine = BOOT.read_text().strip() if BOOT.exists() else socket.gethostname()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return host_places.host_name(), machine, sorted(cores)


def cores_each(places: Sequence[tuple[str, Sequence[int]]]) -> float:
    """Cores for each rank on the machine where these are fewest, given the machine and cores of every rank.

    >>> cores_each([("a", [0, 1]), ("a", [1, 2]), ("b", [0, 1])])
    1.5
    """
    machines = [machine for machine, _ in places]
    cores = {machine: {core for at, own in places if at == machine for core in own} for machine in machines}
    return min(len(cores[machine]) / machines.count(machine) for machine in machines)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that are free on a GPU, or on this host for a CPU; None if the system does not report them."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return unused + torch.cuda.mem_get_info(device)[0]
    available = re.search(r"MemAvailable: +(\d+) kB", MEMINFO.read_text()) if MEMINFO.exists() else None
    return None if available is None else 1024 * int(available[1])
