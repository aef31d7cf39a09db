"""Buckets in memory that all ranks have mapped, where these share a machine: sums over them need no sockets."""

from __future__ import annotations

import functools
import logging
import mmap
import os
import secrets
import select
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import exchange, is_paced

logger = logging.getLogger(__name__)
SWITCH = "GRADWIRE_SHARED_MEMORY"  # 0 in the environment of any rank: over the process group after all
ADDED = (torch.float32, torch.float64)  # what the extension can add up
PAGE = mmap.PAGESIZE
MARK_BYTES = 16
BOOT, SPACES = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns")
UNABLE = "not able: "
LOOK_SECONDS = 0.2  # between two looks whether the other ranks still live


def own_memory(buckets: Sequence[Sequence[Tensor]]) -> Sequence[None]:
    """No bucket lies where other ranks could reach it."""
    return [None] * len(buckets)


class OneHost:
    """Memory for the buckets of ranks on one machine. `device`: of what ranks tell each other.

    Where several process groups are given, buckets are to go over these.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self._group, self._device = groups[0], device
        self.hopeful = len(groups) == 1 and self._group.size() > 1  # not known to be in vain; the same on all ranks

    def memory(self, *, summed: bool) -> Memory:
        """For buckets that are only `summed`, as far as is known, that of all ranks."""
        return self.buffers if summed and self.hopeful else own_memory

    def buffers(self, buckets: Sequence[Sequence[Tensor]]) -> list[SharedBuffer | None]:
        """Room for each bucket, of which the parameters are given; None where it is to have memory of its own.

        A collective call. All ranks get alike: one that cannot has the others do without.
        """
        sizes = [sum(parameter.numel() for parameter in bucket) if _fits(bucket) else 0 for bucket in buckets]
        types = [bucket[0].dtype for bucket, size in zip(buckets, sizes, strict=True) if size]
        segment = Segment([size for size in sizes if size], types, self._group) if types else None
        try:
            made = iter(segment.shared(self._device) if segment is not None else ())
        finally:
            if segment is not None:
                segment.close()
        buffers = [next(made, None) if size else None for size in sizes]
        self.hopeful = any(buffers)
        return buffers


def _fits(bucket: Sequence[Tensor]) -> bool:
    return bool(bucket) and bucket[0].device.type == "cpu" and bucket[0].dtype in ADDED


class Segment:
    """This rank's memory for buckets, on its way to being mapped by all: a file without a name, in memory."""

    def __init__(self, sizes: Sequence[int], types: Sequence[torch.dtype], group: dist.ProcessGroup) -> None:
        self._sizes, self._types, self._group = sizes, types, group
        self._files: list[int] = []
        self._spans: list[tuple[int, int, int]] = []  # of each bucket: offset in bytes, elements, bytes of one
        self._bytes = 0
        self._mark = secrets.token_bytes(MARK_BYTES)  # not to take another file for this one

    def shared(self, device: torch.device) -> list[SharedBuffer]:
        """All buckets, once all ranks have mapped them; none where any rank could not. A collective call."""
        why = obstacle() or ("links are paced" if is_paced() else "")
        told = exchange(f"{UNABLE}{why}" if why else f"{machine()} {self._made()}", self._group, device)
        if why := _separated(told):
            logger.info("sums of gradients go over the process group, not through shared memory: %s", why)
            return []
        files = [text.split()[1:] for text in told]
        maps = self._mapped(files)
        if not all(exchange("mapped" if maps else "", self._group, device)):
            logger.info("sums of gradients go over the process group: a rank cannot map the memory of another")
            return []
        rank = self._group.rank()
        sums = _extension().SharedSums(maps, rank, self._spans)
        neighbours = Neighbours(sums, {other: int(file[0]) for other, file in enumerate(files) if other != rank})
        spans = zip(self._types, self._spans, strict=True)
        flats = [torch.frombuffer(maps[rank], dtype=kind, count=size, offset=at) for kind, (at, size, _) in spans]
        return [SharedBuffer(flat, neighbours, place) for place, flat in enumerate(flats)]

    def close(self) -> None:
        """What is mapped stays; it is freed with the last who has mapped it, however that ends."""
        for file in self._files:
            os.close(file)
        self._files = []

    def _made(self) -> str:
        """The file, as this rank's process, its number there, and its mark."""
        offset = _pages(_extension().SharedSums.header_bytes(len(self._sizes), self._group.size()))
        for size, kind in zip(self._sizes, self._types, strict=True):
            self._spans.append((offset, size, kind.itemsize))
            offset = _pages(offset + size * kind.itemsize)
        self._bytes = offset + PAGE
        file = os.memfd_create("gradwire")
        self._files.append(file)
        os.ftruncate(file, self._bytes)
        os.pwrite(file, self._mark, offset)
        return f"{os.getpid()} {file} {self._mark.hex()}"

    def _mapped(self, files: Iterable[Sequence[str]]) -> list[mmap.mmap]:
        """The memory of all ranks; nothing where one's is out of reach."""
        maps = []
        for process, number, mark in files:
            try:
                file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
                self._files.append(file)
                if (
                    os.fstat(file).st_size != self._bytes
                    or os.pread(file, MARK_BYTES, self._bytes - PAGE).hex() != mark
                ):
                    return []
                maps.append(mmap.mmap(file, self._bytes))
            except OSError:
                return []
        return maps


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def obstacle() -> str:
    """Why this process cannot share memory with other ranks; empty where it can."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    if sys.platform != "linux":
        return "only Linux has what it takes"
    try:
        _extension()
        os.close(os.pidfd_open(os.getpid()))
        machine()
    except ImportError as error:
        return f"the extension is not built ({error}); reinstall gradwire where there is a C++17 compiler"
    except OSError as error:
        return f"the system does not let a process find others: {error}"
    return ""


@functools.cache
def _extension() -> Any:
    """The sums in C++; ImportError where they were not built."""
    return import_module("._shared", __package__)


def machine() -> str:
    """The machine, its network and its processes as this one sees them, without spaces; OSError where that is not told."""
    return ",".join([BOOT.read_text().strip(), *(os.readlink(SPACES / kind) for kind in ("net", "pid"))])


def _separated(told: Sequence[str]) -> str:
    """Why ranks that told this have no memory in common; empty where they may have."""
    words = [text.split() for text in told]
    for rank, text in enumerate(told):
        if text.startswith(UNABLE):
            return f"rank {rank}: {text.removeprefix(UNABLE)}"
        if words[rank][0] != words[0][0]:
            return f"ranks 0 and {rank} are on different machines, or in containers of their own"
    return "ranks are threads of one process" if len({each[1] for each in words}) < len(told) else ""


class Neighbours:
    """The other ranks whose memory is mapped. `processes`: of each."""

    def __init__(self, sums: Any, processes: Mapping[int, int]) -> None:
        self.sums = sums
        self._ranks = {os.pidfd_open(process): rank for rank, process in processes.items()}
        self._poll = select.poll()
        for file in self._ranks:
            self._poll.register(file, select.POLLIN)
        weakref.finalize(self, _close, list(self._ranks))

    def ended(self) -> list[int]:
        """The ranks whose processes are gone."""
        return sorted(self._ranks[file] for file, _ in self._poll.poll(0))


def _close(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)


@dataclass(frozen=True, eq=False)
class SharedBuffer:
    """A bucket's numbers, `flat`, which all ranks can reach. `place`: its number among those that were made together."""

    flat: Tensor
    neighbours: Neighbours
    place: int

    def sum(self) -> SharedSum:
        """Begin to add it up over ranks, in place: all do so for the same buckets, each as soon as it likes."""
        return SharedSum(self)


Memory: TypeAlias = Callable[[Sequence[Sequence[Tensor]]], Sequence[SharedBuffer | None]]  # of buckets, by parameters


class SharedSum:
    """The sum of a bucket that has begun. It needs no rank's time but that of those who wait."""

    def __init__(self, buffer: SharedBuffer) -> None:
        self._neighbours, self._sums, self._place = buffer.neighbours, buffer.neighbours.sums, buffer.place
        self._sums.arrive(self._place)

    def wait(self, timeout: timedelta) -> None:
        """Return when it is there; RuntimeError where a rank has ended or gives up, or after the time limit."""
        if self._sums.wait(self._place, LOOK_SECONDS):
            return
        deadline = time.monotonic() + timeout.total_seconds()
        ended: list[int] = []
        while not self._sums.wait(self._place, LOOK_SECONDS):
            if (rank := self._sums.given_up()) >= 0:
                raise RuntimeError(f"rank {rank} has given up; see what it raised")
            if ended:
                raise RuntimeError(f"rank {ended[0]} has ended before the sum was there")
            if time.monotonic() > deadline:
                raise RuntimeError(f"timed out after {timeout}: {self._missing()} still to bring gradients")
            ended = self._neighbours.ended()  # what they left undone may be under way: one more look

    def _missing(self) -> str:
        ranks = self._sums.missing(self._place)
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {'have' if len(ranks) > 1 else 'has'}"

    def is_completed(self) -> bool:
        """Whether it is there."""
        return bool(self._sums.is_there(self._place))

    def arrived_at(self) -> float:
        """When it was there, by time.perf_counter, which is the monotonic clock where memory can be shared."""
        return float(self._sums.since(self._place))

    def drop(self) -> None:
        """Have all ranks give it up."""
        self._sums.give_up()
