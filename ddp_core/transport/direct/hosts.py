"""Which ranks share a host, and memory that those have in common."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..host_places import host_name
from ..host_segment import MARK_BYTES, obstacle
from ..processes import extension, machine
from .wire import Wire

logger = logging.getLogger(__name__)
NAME_BYTES = 16
ADDRESS_BYTES = 128  # of the text that tells where a host's memory is


def hosts_of(wire: Wire) -> list[list[int]]:
    """The ranks of each host, in order; a rank that cannot share memory has a host of its own. A collective call."""
    return _alike(wire, secrets.token_hex(NAME_BYTES) if obstacle() else machine())


def has_neighbours(wire: Wire) -> bool:
    """Whether any host has several ranks, whatever these can share. A collective call."""
    return len(_alike(wire, host_name())) < wire.size


def _alike(wire: Wire, name: str) -> list[list[int]]:
    """The ranks that pass the same name, in order."""
    mine = hashlib.blake2s(name.encode(), digest_size=NAME_BYTES).digest()
    names = torch.empty(wire.size, NAME_BYTES, dtype=torch.uint8)
    wire.wait(wire.gloo.allgather([list(names.unbind())], [torch.frombuffer(bytearray(mine), dtype=torch.uint8)]))
    groups: dict[bytes, list[int]] = {}
    for rank, each in enumerate(names):
        groups.setdefault(bytes(each.tolist()), []).append(rank)
    return list(groups.values())


def shared_memory(wire: Wire, mates: Sequence[int], size: int) -> Tensor | None:
    """So many bytes that the ranks of each host, `mates`, have mapped: a file without a name, of their first rank.

    None, on all ranks, where any cannot. A collective call of all ranks. It is freed with the last who has mapped it.
    """
    first, file, memory = mates[0], -1, None
    mark = secrets.token_bytes(MARK_BYTES)
    try:
        if wire.rank == first:
            file = _made(size, mark)
    except OSError as error:
        logger.info("rank %d has no memory for its host: %s", wire.rank, error)
    address = f"{os.getpid()} {file} {mark.hex()}".ljust(ADDRESS_BYTES).encode()
    text = torch.frombuffer(bytearray(address), dtype=torch.uint8)
    wire.wait_all([wire.send(text, mate) for mate in mates[1:]] if wire.rank == first else [wire.receive(text, first)])
    try:
        memory = _mapped(bytes(text.tolist()).decode().split(), size)
    except OSError as error:
        logger.info("rank %d cannot map the memory of rank %d: %s", wire.rank, first, error)
    everyone = _all_have(wire, memory is not None)
    if file >= 0:
        os.close(file)
    return memory if everyone else None


def _made(size: int, mark: bytes) -> int:
    file: int = extension().memory_file("gradwire")
    os.posix_fallocate(file, 0, size + MARK_BYTES)  # here it may fail, later it would kill
    os.pwrite(file, mark, size)
    return file


def _mapped(address: Sequence[str], size: int) -> Tensor:
    process, number, mark = address
    file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
    try:
        if os.pread(file, MARK_BYTES, size).hex() != mark:
            raise OSError(f"file {number} of process {process} is not what its rank has made")
        memory = extension().Memory(file, size)
    finally:
        os.close(file)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _all_have(wire: Wire, mine: bool) -> bool:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MIN
    flag = torch.tensor([int(mine)])
    wire.wait(wire.gloo.allreduce([flag], options))
    return bool(flag.item())
