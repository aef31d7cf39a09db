"""Buckets in memory that the ranks of a machine have mapped: whoever waits for numbers adds them up, without sockets."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...compress.protocol.requests import AllGather, AllReduce, ReduceScatter, Request
from .agreement import Check, nothing
from .host_segment import Segment, SharedBuffer
from .processes import CHECK_SECONDS
from .protocol import Decorated, Reply, Transport

ADDED = (torch.float32, torch.float64)  # what the extension can add up


class HostMemory(Decorated):
    """Carries through memory what ranks ask each other for of buckets that it has allocated, and all else by `inner`.

    Until `arrange` has said that hosts have several ranks, these are sums over all ranks, which then share one machine; from
    then on the shares of a bucket, which the ranks of a host sum and give out.
    """

    def __init__(self, inner: Transport, check: Check = nothing) -> None:
        super().__init__(inner)
        self._check = check
        self._in_vain: set[int] = set()  # for so many ranks of a host there is no memory
        self._buffers: dict[int, WeakTensorKeyDictionary] = defaultdict(WeakTensorKeyDictionary)  # by ranks, and tensor
        self._shares: dict[int, Share] = {}  # under way, by the identity of their numbers

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
        if here == 1 or flat in self._buffers[here] or not fits([flat]) or not flat.numel():
            return None
        return next(iter(self._mapped([flat.numel()], [flat.dtype])), None)

    def _mapped(self, sizes: Sequence[int], types: Sequence[torch.dtype]) -> list[Tensor]:
        here = self.ranks.per_host
        kind, count = ("SharedSums", self.ranks.world_size) if here == 1 else ("SharedShares", here)
        made = Segment(sizes, types, self.inner, kind, count).shared() if sizes and self.allocates else []
        if sizes and not made:
            self._in_vain.add(here)
        self._buffers[here].update(made)
        return [flat for flat, _ in made]

    def start(self, request: Request, channel: int) -> Reply:
        """Tell the others that numbers are there, each rank as soon as it likes; or what else it is, as the inner one."""
        tensor = request.tensor
        if isinstance(request, AllReduce) and request.op == "sum" and (buffer := self._buffers[1].get(tensor)):
            copied(tensor, buffer.memory)
            buffer.sums.arrive(buffer.place)
            return SharedReply(buffer, buffer.place, partial(copied, buffer.memory, tensor), self._check)
        hosts = self._buffers[self.ranks.per_host]
        if isinstance(request, ReduceScatter) and request.scope == "host" and (buffer := hosts.get(tensor)):
            return self._sum_share(buffer, request)
        if isinstance(request, AllGather) and (share := self._shares.pop(id(tensor), None)):
            buffer = share.buffer
            buffer.sums.share(buffer.place, share.first, share.numbers.numel())
            buffer.sums.arrive(2 * buffer.place + 1)
            finish = partial(copied, buffer.memory, share.flat)
            return SharedReply(buffer, 2 * buffer.place + 1, finish, self._check)
        return self.inner.start(request, channel)

    def _sum_share(self, buffer: SharedBuffer, request: ReduceScatter) -> Reply:
        place, scale = self.ranks.place, 1 / self.ranks.per_host if request.op == "mean" else 1.0
        first = sum(request.sizes[:place])
        share = Share(buffer, request.tensor, first, buffer.memory[first : first + request.sizes[place]])
        self._shares[id(share.numbers)] = share
        copied(share.flat, buffer.memory)
        buffer.sums.arrive(2 * buffer.place)
        return SharedReply(buffer, 2 * buffer.place, partial(share.sum, scale), self._check)

    def abort(self) -> None:
        """Have no rank wait for this one any more."""
        self._shares = {}
        try:
            for buffers in list(self._buffers.values()):
                for buffer in list(buffers.values()):
                    buffer.sums.give_up()
        finally:
            self.inner.abort()


@dataclass(frozen=True)
class Share:
    """This rank's part of a bucket that lies at `flat`: `numbers`, from its element `first` on."""

    buffer: SharedBuffer
    flat: Tensor
    first: int
    numbers: Tensor

    def sum(self, scale: float) -> Tensor:
        """Add up the share of all ranks, each times `scale`."""
        self.buffer.sums.sum(self.buffer.place, self.first, self.numbers.numel(), scale)
        return self.numbers


@dataclass(eq=False)
class SharedReply(Reply):
    """The contributions of all ranks to a `place` of a bucket's counters. Only the ranks that wait spend time.

    `finish`: what these then do, for the reply. `check`: what a wait that takes long does now and then; it may raise.
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


def fits(bucket: Sequence[Tensor]) -> bool:
    """Return True if a bucket of these parameters can be added up in shared memory."""
    return bool(bucket) and bucket[0].device.type == "cpu" and bucket[0].dtype in ADDED
