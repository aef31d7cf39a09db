"""The GPUs of this machine that NVLink joins, as nvidia-smi tells it."""

from __future__ import annotations

import functools
import re
import subprocess

import torch

SECONDS = 20  # for nvidia-smi, which may have to wake a driver first
JOINED = "NV"  # what the matrix has for pairs that NVLink joins, before the number of links
ROW = re.compile(r"^GPU(\d+)\s+(.*)$")
STYLE = re.compile(r"\x1b\[[0-9;]*m")  # the head of the matrix is underlined


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
