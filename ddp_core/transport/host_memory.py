"""Buckets in memory that the ranks of a machine have mapped: ranks add up each other's numbers there, without sockets."""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import secrets
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...compress.protocol.requests import AllGather, AllReduce, ReduceScatter, Request
from .lost_ranks import CHECK_SECONDS, Processes, close_files, extension, machine
from .protocol import Decorated, Reply, Transport
from .rank_messages import exchange
from .swap_agreement import Check, nothing

ADDED = (torch.float32, torch.float64)  # what the extension can add up
logger = logging.getLogger(__name__)
SWITCH = "GRADWIRE_SHARED_MEMORY"  # 0 in the environment of any rank: over the process group after all
PAGE = mmap.PAGESIZE
MARK_BYTES = 16  # behind what a file holds, not to take another one for it
UNABLE = "not able: "
MEMORY = "where their buckets lie in memory"


class HostMemory(Decorated):
    """Carries through memory what ranks ask each other for of buckets that it has allocated, and all else by `inner`.

    Until `arrange` has said that hosts have several ranks, these are sums over all ranks, which then share one machine; from
    then on the shares of a bucket, which the ranks of a host sum and give out.
    """

    def __init__(self, inner: Transport, check: Check = nothing) -> None:
        super().__init__(inner)
        self._check = check
        self._in_vain: set[int] = set()  # for so many ranks of a host there is no memory
        # The buckets' buffers, by the tensor that was given. Those of shares first by the ranks of a host, which may change.
        self._sums = WeakTensorKeyDictionary()
        self._shares: dict[int, WeakTensorKeyDictionary] = defaultdict(WeakTensorKeyDictionary)
        # Until there are buffers all requests go to `inner`, with no frame of ours. Then the attribute goes, and `start` is
        # the method below again: as an attribute it would keep this object, and so its memory, alive until a collection.
        self.start = inner.start  # type: ignore[method-assign]

    @property
    def allocates(self) -> bool:
        """Until it was in vain."""
        return self.ranks.world_size > 1 and self.ranks.per_host not in self._in_vain

    def allocate(self, buckets: Sequence[Sequence[Tensor]]) -> Sequence[Tensor | None]:
        """Memory that all ranks of a host have mapped, or none for any: a rank that cannot has all others do without."""
        sizes = [sum(parameter.numel() for parameter in bucket) if fits(bucket) else 0 for bucket in buckets]
        types = [bucket[0].dtype for bucket, size in zip(buckets, sizes, strict=True) if size]
        made = iter(self._mapped([size for size in sizes if size], types))
        return [next(made, None) if size else None for size in sizes]

    def allocate_for(self, flat: Tensor) -> Tensor | None:
        """Memory for a bucket that does not lie in any of its own, and whose shares are summed."""
        here = self.ranks.per_host
        if here == 1 or flat in self._shares[here] or not fits([flat]) or not flat.numel():
            return None
        return next(iter(self._mapped([flat.numel()], [flat.dtype])), None)

    def _mapped(self, sizes: Sequence[int], types: Sequence[torch.dtype]) -> list[Tensor]:
        here = self.ranks.per_host
        kind, count = ("SharedSums", self.ranks.world_size) if here == 1 else ("SharedShares", here)
        made = Segment(sizes, types, self.inner, kind, count).shared() if sizes and self.allocates else []
        if sizes and not made:
            self._in_vain.add(here)
        if made:
            (self._sums if here == 1 else self._shares[here]).update(made)
            vars(self).pop("start", None)
        return [flat for flat, _ in made]

    def start(self, request: Request, channel: int) -> Reply:
        """Tell the others that numbers are there, each rank as soon as it likes; or what else it is, as the inner one.

        A request shows by its tensor that its numbers lie in shared memory: it is the object itself that `allocate` gave.

        | request | bucket | what goes through memory |
        | --- | --- | --- |
        | AllReduce that sums | `tensor` | the sum over all ranks |
        | ReduceScatter within hosts | `tensor` | the sum of this rank's share |
        | AllGather of what that sum gave | `within` | the shares of a host's ranks, this one's in `tensor` |
        | any other | none | nothing: `inner` starts it |
        """
        tensor = request.tensor
        if isinstance(request, AllReduce) and request.op == "sum" and (buffer := self._sums.get(tensor)):
            copied(tensor, buffer.memory)
            buffer.sums.arrive(buffer.place)
            return SharedReply(buffer, buffer.place, partial(copied, buffer.memory, tensor), self._check)
        shares = self._shares[self.ranks.per_host]
        if isinstance(request, ReduceScatter) and request.scope == "host" and (buffer := shares.get(tensor)):
            copied(tensor, buffer.memory)
            buffer.sums.arrive(2 * buffer.place)
            scale = 1 / self.ranks.per_host if request.op == "mean" else 1.0
            finish = partial(summed, buffer, *self._share(buffer, request.sizes), scale)
            return SharedReply(buffer, 2 * buffer.place, finish, self._check)
        if isinstance(request, AllGather) and request.within is not None and (buffer := shares.get(request.within)):
            first, share = self._share(buffer, request.sizes)
            copied(tensor, share)
            buffer.sums.share(buffer.place, first, share.numel())
            buffer.sums.arrive(2 * buffer.place + 1)
            finish = partial(copied, buffer.memory, request.within)
            return SharedReply(buffer, 2 * buffer.place + 1, finish, self._check)
        return self.inner.start(request, channel)

    def _share(self, buffer: SharedBuffer, sizes: Sequence[int]) -> tuple[int, Tensor]:
        """Return the share of this rank, and its first element, where a host's ranks cut a bucket into these sizes."""
        first = sum(sizes[: self.ranks.place])
        return first, buffer.memory[first : first + sizes[self.ranks.place]]

    def abort(self) -> None:
        """Have no rank wait for this one any more."""
        try:
            for buffers in (self._sums, *self._shares.values()):
                for buffer in list(buffers.values()):
                    buffer.sums.give_up()
        finally:
            self.inner.abort()


@dataclass(eq=False)
class SharedReply(Reply):
    """The contributions of all ranks to a `place` of a bucket's counters.

    A rank that waits adds up its own share. Sums over all ranks are added up by ranks that wait, and by a helper thread of
    each rank (native/shared_sums.hpp). `finish`: what a wait does then, for the reply. `check`: what a wait that takes long
    does now and then; it may raise.
    """

    buffer: SharedBuffer
    place: int
    finish: Callable[[], Tensor]
    check: Check

    def wait(self, timeout: timedelta) -> Tensor:
        """The reply when all is there; RuntimeError where a rank has ended or gives up, or after the time limit."""
        sums = self.buffer.sums
        if not sums.wait(self.place, CHECK_SECONDS):
            self._wait_and_check(timeout)
        self.arrived = float(sums.since(self.place))  # of the last rank: the monotonic clock is time.perf_counter here
        return self.finish()

    def _wait_and_check(self, timeout: timedelta) -> None:
        sums, first = self.buffer.sums, self.buffer.first
        deadline = time.monotonic() + timeout.total_seconds()
        ended: list[int] = []
        while not sums.wait(self.place, CHECK_SECONDS):
            self.check()  # first: those that differ give up
            if (rank := sums.given_up()) >= 0:
                raise RuntimeError(f"rank {first + rank} has given up or was closed; see its error")
            if ended:
                raise RuntimeError(f"rank {ended[0]} has ended before the sum was there")
            if time.monotonic() > deadline:
                missing = [first + rank for rank in sums.missing(self.place)]
                late = (
                    f"of ranks {missing} gradients are missing"
                    if missing
                    else "a rank has not done its part of the sum"
                )
                raise RuntimeError(f"timed out after {timeout}: {late}")
            ended = self.buffer.processes.ended()  # what they have left undone may be under way: one more look

    def abandon(self) -> None:
        """Have all ranks of the host give it up."""
        self.buffer.sums.give_up()


def copied(source: Tensor, target: Tensor) -> Tensor:
    """Return `target` with the numbers of `source`; they may be one memory."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
    return target


def summed(buffer: SharedBuffer, first: int, share: Tensor, scale: float) -> Tensor:
    """Return a share, from the bucket's element `first` on, as the sum of all ranks' numbers, each times `scale`."""
    buffer.sums.sum(buffer.place, first, share.numel(), scale)
    return share


def fits(bucket: Sequence[Tensor]) -> bool:
    """Return True if a bucket of these parameters can be added up in shared memory."""
    return bool(bucket) and bucket[0].device.type == "cpu" and bucket[0].dtype in ADDED


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
