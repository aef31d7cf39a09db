"""The ranks that share a host: by machine, or as the user says."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from itertools import groupby

import torch
import torch.distributed as dist

from .collectives import exchange
from .processes import BOOT, SPACES

WAY_OUT = (
    "give every host as many ranks, with consecutive numbers, as torchrun --nproc-per-node does, or say how many ranks "
    "count as a host: hosts:ranks=2+..."
)


def host_name() -> str:
    """The machine and its network as this process sees them: what lies behind one network card."""
    try:
        return f"{socket.gethostname()} {BOOT.read_text().strip()} {os.readlink(SPACES / 'net')}"
    except OSError:  # not Linux
        return socket.gethostname()


def ranks_per_host(group: dist.ProcessGroup, device: torch.device) -> int:
    """Return the number of ranks on each host. A collective call; raises ValueError on all ranks where hosts differ."""
    return even(exchange(host_name(), group, device, what="which host they are on"))


def even(hosts: Sequence[str]) -> int:
    """The ranks of a host, given the host of each rank; ValueError where these are not as many on every host, in a row.

    >>> even(["a", "a", "b", "b"])
    2
    """
    counts = [len(list(ranks)) for _, ranks in groupby(hosts)]
    if len(counts) > len(set(hosts)):
        seen = list(dict.fromkeys(hosts))
        places = [seen.index(host) for host in hosts]
        raise ValueError(f"the ranks of a host do not follow each other: ranks lie on hosts {places}; {WAY_OUT}")
    if len(set(counts)) > 1:
        raise ValueError(f"the hosts have different numbers of ranks: {counts}; {WAY_OUT}")
    return counts[0]
