"""The ranks that share a host, or an island of NVLink within one: by machine, or as the user says."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from itertools import groupby

import torch

from .collectives import exchange
from .nvlink import island_of
from .processes import BOOT, SPACES
from .protocol import Transport

logger = logging.getLogger(__name__)
WAY_OUT = (
    "give each as many ranks, with consecutive numbers, as torchrun --nproc-per-node does with hosts and "
    "CUDA_VISIBLE_DEVICES with GPUs, or say how many ranks count as a host: hosts:ranks=2+..."
)


def host_name() -> str:
    """The machine and its network as this process sees them: what lies behind one network card."""
    try:
        return f"{socket.gethostname()} {BOOT.read_text().strip()} {os.readlink(SPACES / 'net')}"
    except OSError:  # not Linux
        return socket.gethostname()


def ranks_per_host(transport: Transport, device: torch.device) -> int:
    """Return the number of ranks on each host, or where all are on one host, in each island of GPUs that NVLink joins.

    A collective call; raises ValueError on all ranks where hosts or islands differ.
    """
    texts = exchange(f"{host_name()}\t{island_of(device)}", transport, what="their hosts")
    hosts, islands = zip(*(text.split("\t") for text in texts), strict=True)
    if device.type == "cuda" and len(set(hosts)) == 1 < len(hosts) and not all(islands) and transport.ranks.rank == 0:
        logger.warning(
            "hosts+ takes all ranks of this host for one island of NVLink, since nvidia-smi does not show which GPUs it "
            "joins. If it joins none, write hosts:ranks=1+..."
        )
    return of_each(hosts, islands)


def of_each(hosts: Sequence[str], islands: Sequence[str]) -> int:
    """The ranks of a host, or where there is one host of known islands, of an island; given those of every rank.

    >>> of_each(["a"] * 4, ["x", "x", "y", "y"]), of_each(["a", "a", "b", "b"], ["x", "y", "z", "z"])
    (2, 2)
    """
    if len(set(hosts)) > 1 or not all(islands):
        return even(hosts)
    return even(islands, "islands of NVLink")


def even(hosts: Sequence[str], what: str = "hosts") -> int:
    """The ranks of a host, given the host of each rank; ValueError where these are not as many on every host, in a row.

    >>> even(["a", "a", "b", "b"])
    2
    """
    counts = [len(list(ranks)) for _, ranks in groupby(hosts)]
    if len(counts) > len(set(hosts)):
        seen = list(dict.fromkeys(hosts))
        places = [seen.index(host) for host in hosts]
        raise ValueError(
            f"the ranks of {what} do not follow each other: in the order of ranks, the {what} are {places}; {WAY_OUT}"
        )
    if len(set(counts)) > 1:
        raise ValueError(f"the {what} have different numbers of ranks: {counts}; {WAY_OUT}")
    return counts[0]
