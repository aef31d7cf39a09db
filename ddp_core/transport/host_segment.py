"""Memory for buckets that all ranks of a machine have mapped, and what keeps a machine from it."""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from .collectives import exchange
from .processes import Processes, close_files, extension, machine
from .protocol import Transport

logger = logging.getLogger(__name__)
SWITCH = "GRADWIRE_SHARED_MEMORY"  # 0 in the environment of any rank: over the process group after all
PAGE = mmap.PAGESIZE
MARK_BYTES = 16  # behind what a file holds, not to take another one for it
UNABLE = "not able: "
MEMORY = "where their buckets lie in memory"


@dataclass(frozen=True, eq=False)
class SharedBuffer:
    """The `memory` of a bucket that all ranks can reach.

    Nobody else has this tensor: who has one that was given, or a view of it, may make torch move that elsewhere
    (`share_memory_`). `sums`: the counters of all buckets that were made together (native/shared_sums.hpp and, with two
    places for each bucket, native/shared_shares.hpp). `place`: the bucket's number among these. `first`: of the ranks that
    have it.
    """

    memory: Tensor
    sums: Any
    processes: Processes
    place: int
    first: int


class Segment:
    """This rank's memory for buckets, on its way to being mapped by all: a file without a name, in memory.

    `kind`: the extension's class for what is done in it. `count`: so many consecutive ranks map each other's.
    """

    def __init__(
        self, sizes: Sequence[int], types: Sequence[torch.dtype], transport: Transport, kind: str, count: int
    ) -> None:
        self._sizes, self._types, self._transport, self._kind, self._count = sizes, types, transport, kind, count
        self._first = transport.ranks.rank - transport.ranks.rank % count
        self._file: int | None = None
        self._spans: list[tuple[int, int, int]] = []  # of each bucket: offset in bytes, elements, bytes of one
        self._bytes = 0

    def shared(self) -> list[tuple[Tensor, SharedBuffer]]:
        """A flat tensor for each bucket, and its memory, once all ranks have mapped it; none where any rank could not.

        A collective call. What is mapped is freed with the last who has mapped it, however that ends.
        """
        try:
            return self._shared()
        finally:
            if self._file is not None:
                os.close(self._file)

    def _shared(self) -> list[tuple[Tensor, SharedBuffer]]:
        texts = exchange(self._address(), self._transport, what=MEMORY)
        hosts = range(0, len(texts), self._count)
        why = next(filter(None, (_separated(texts[first : first + self._count], first) for first in hosts)), "")
        mine = texts[self._first : self._first + self._count]
        buffers = [] if why else self._mapped([text.split()[2:] for text in mine])
        if not why and not all(exchange("mapped" if buffers else "", self._transport, what=MEMORY)):
            why = "a rank cannot map the memory of another"
        if why:
            logger.info("sums of gradients go over the process group, not through shared memory: %s", why)
        return [] if why else buffers

    def _address(self) -> str:
        """Return the text by which other ranks map this rank's memory, or the reason why they cannot."""
        why = obstacle()
        try:
            return f"{UNABLE}{why}" if why else f"{machine()} {self._made()}"
        except OSError as error:
            return f"{UNABLE}{error}"

    def _made(self) -> str:
        """The buckets' places, and the address of the memory."""
        offset = _pages(self._class().header_bytes(len(self._sizes), self._count))
        for size, kind in zip(self._sizes, self._types, strict=True):
            self._spans.append((offset, size, kind.itemsize))
            offset = _pages(offset + size * kind.itemsize)
        self._bytes = offset
        self._file, address = memory_file(offset)
        return f"{hashlib.sha256(repr(self._spans).encode()).hexdigest()} {address}"

    def _class(self) -> Any:
        return getattr(extension(), self._kind)

    def _mapped(self, addresses: Sequence[Sequence[str]]) -> list[tuple[Tensor, SharedBuffer]]:
        """The buckets in the memory of all ranks; none where one's is out of reach."""
        rank, first = self._transport.ranks.rank, self._first
        try:
            others = Processes({other: int(each[0]) for other, each in enumerate(addresses, first) if other != rank})
            memories = [mapped(each, self._bytes) for each in addresses]
            sums = self._class()(memories, rank - first, self._spans)
            flats, memory = (self._tensors(memories[rank - first]) for _ in range(2))
        except (OSError, RuntimeError, MemoryError) as error:
            logger.info("rank %d cannot map the memory of all ranks: %s", rank, error)
            return []
        pairs = zip(flats, memory, strict=True)
        return [
            (flat, SharedBuffer(flat_memory, sums, others, n, first)) for n, (flat, flat_memory) in enumerate(pairs)
        ]

    def _tensors(self, memory: Any) -> list[Tensor]:
        seen, spans = numpy.asarray(memory), zip(self._types, self._spans, strict=True)
        return [torch.frombuffer(seen, dtype=kind, count=numel, offset=offset) for kind, (offset, numel, _) in spans]


def memory_file(size: int) -> tuple[int, str]:
    """A file without a name, in memory, to be closed once others have mapped it; and its address, for `mapped`.

    OSError where there is no room.
    """
    file, mark = extension().memory_file("gradwire"), secrets.token_bytes(MARK_BYTES)
    try:
        os.posix_fallocate(file, 0, size + MARK_BYTES)  # here it may fail, later it would kill
        os.pwrite(file, mark, size)
        extension().seal_size(file)  # who maps a file that shrinks is killed
    except OSError:
        os.close(file)
        raise
    return file, f"{os.getpid()} {file} {mark.hex()}"


def mapped(address: Sequence[str], size: int) -> Any:
    """Return `size` bytes of a rank's memory, for `numpy.asarray`; raise OSError where they are out of reach."""
    process, number, mark = address
    file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
    try:
        if os.pread(file, MARK_BYTES, size).hex() != mark:
            raise OSError(f"file {number} of process {process} is not the file of its rank")
        return extension().Memory(file, size)
    finally:
        os.close(file)


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def obstacle() -> str:
    """Why this process cannot share memory with other ranks; empty where it can."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    if sys.platform != "linux":
        return "only Linux can share such memory"
    try:
        close_files([extension().process_file(os.getpid())])
        machine()
    except (ImportError, AttributeError) as error:  # not there, or of another version
        return f"the extension is not built ({error}); reinstall gradwire where there is a C++17 compiler"
    except OSError as error:
        return f"the system does not let a process find others: {error}"
    return ""


def _separated(texts: Sequence[str], first: int = 0) -> str:
    """Why ranks from `first` on, given the text of each, have no memory in common; empty where they may have."""
    words = [text.split() for text in texts]
    for place, text in enumerate(texts):
        if text.startswith(UNABLE):
            return f"rank {first + place}: {text.removeprefix(UNABLE)}"
        if words[place][0] != words[0][0]:
            return f"ranks {first} and {first + place} are on different hosts, or in separate containers"
        if words[place][1] != words[0][1]:
            return f"ranks {first} and {first + place} have different buckets"
    return "ranks are threads of one process" if len({each[2] for each in words}) < len(texts) else ""
