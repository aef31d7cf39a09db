"""The ranks that share a host, or an island of NVLink within one: by machine and nvidia-smi, or as the user says."""

from __future__ import annotations

import functools
import logging
import os
import re
import socket
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

import torch

from .lost_ranks import BOOT, SPACES
from .protocol import Transport
from .rank_messages import exchange

logger = logging.getLogger(__name__)
WAY_OUT = (
    "give each as many ranks, with consecutive numbers, as torchrun --nproc-per-node does with hosts and "
    "CUDA_VISIBLE_DEVICES with GPUs, or say how many ranks count as a host: hosts:ranks=2+..."
)

SECONDS = 20  # for nvidia-smi, which may have to wake a driver first
JOINED = "NV"  # what the matrix has for pairs that NVLink joins, before the number of links
ROW = re.compile(r"^GPU(\d+)\s+(.*)$")
STYLE = re.compile(r"\x1b\[[0-9;]*m")  # the head of the matrix is underlined


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


@functools.cache
def connections() -> dict[str, dict[str, str]]:
    """Return how the GPUs of this machine reach each other, {UUID: {UUID of another: kind}}; {} where nvidia-smi fails.

    Kinds are those of `nvidia-smi topo -m`: NV12 (12 links of NVLink), PIX, PXB and PHB (PCIe, by way of a switch, several,
    or the processor), NODE and SYS (from one processor to another).
    """
    try:
        uuids = _asked("--query-gpu=uuid", "--format=csv,noheader").split()
        return matrix(_asked("topo", "-m"), uuids)
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


def _asked(*arguments: str) -> str:
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SECONDS, check=True)
    return done.stdout


def matrix(text: str, uuids: list[str]) -> dict[str, dict[str, str]]:
    """The table of `nvidia-smi topo -m` by UUID, in the order of its GPUs. Raises ValueError for another number of them.

    >>> matrix("\\tGPU0\\tGPU1\\tCPU Affinity\\nGPU0\\t X \\tPHB\\t0-15\\nGPU1\\tPHB\\t X \\t0-15", ["a", "b"])
    {'a': {'b': 'PHB'}, 'b': {'a': 'PHB'}}
    """
    rows = [found[2].split()[: len(uuids)] for line in STYLE.sub("", text).splitlines() if (found := ROW.match(line))]
    if [len(row) for row in rows] != [len(uuids)] * len(uuids):
        raise ValueError(f"nvidia-smi lists {len(uuids)} GPUs, but its matrix has rows of {[*map(len, rows)]}")
    return {
        mine: {other: kind for other, kind in zip(uuids, row, strict=True) if other != mine}
        for mine, row in zip(uuids, rows, strict=True)
    }


def pairs(kinds: Mapping[str, Mapping[str, str]]) -> dict[str, int]:
    """Return how many pairs of GPUs have each kind of connection.

    >>> pairs({"a": {"b": "NV4", "c": "SYS"}, "b": {"a": "NV4", "c": "SYS"}, "c": {"a": "SYS", "b": "SYS"}})
    {'NV4': 1, 'SYS': 2}
    """
    found = Counter(kind for mine, others in kinds.items() for other, kind in others.items() if mine < other)
    return dict(sorted(found.items()))


def island(uuid: str, kinds: dict[str, dict[str, str]]) -> str:
    """A name for the GPUs that NVLink joins with one, directly or over others; "" where nothing is known of it.

    >>> kinds = {"a": {"b": "NV4", "c": "SYS"}, "b": {"a": "NV4", "c": "SYS"}, "c": {"a": "SYS", "b": "SYS"}}
    >>> [island(gpu, kinds) for gpu in "abcd"]
    ['a', 'a', 'c', '']
    """
    reached, new = set[str](), {uuid} & kinds.keys()
    while new:
        reached |= new
        new = {other for gpu in new for other, kind in kinds[gpu].items() if kind.startswith(JOINED)} - reached
    return min(reached, default="")


def island_of(device: torch.device) -> str:
    """The island of a device of this process; "" where it is no GPU, or nothing is known of it."""
    if device.type != "cuda" or torch.version.cuda is None:
        return ""
    return island(f"GPU-{torch.cuda.get_device_properties(device).uuid}", connections())
