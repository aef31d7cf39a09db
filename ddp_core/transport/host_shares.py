"""Inside a host, the shares of a bucket are summed and given out through memory that its ranks have mapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...compress.protocol import AllGather, ReduceScatter, Request
from .agreement import Look, nothing
from .host_memory import ADDED, fits
from .host_segment import Segment
from .protocol import Decorated, Reply, Transport
from .shared_buffer import SharedBuffer, Sums


class Shares(Sums, Protocol):
    """Of buckets that were made together, gradients (at place 2 b) and shares (2 b + 1): see native/shared_shares.hpp."""

    def sum(self, bucket: int, first: int, count: int, scale: float) -> None: ...
    def share(self, bucket: int, first: int, count: int) -> None: ...


@dataclass(frozen=True)
class Part:
    """This rank's share of a bucket in shared memory: `numbers`, from its element `first` on."""

    buffer: SharedBuffer[Shares]
    first: int
    numbers: Tensor

    def arrive(self, *, shared: bool) -> None:
        """Tell the others that this rank's gradients are there, or its share."""
        self.buffer.sums.arrive(2 * self.buffer.place + shared)

    def sum(self, scale: float) -> None:
        """Add up the share of all ranks, each times `scale`."""
        self.buffer.sums.sum(self.buffer.place, self.first, self.numbers.numel(), scale)

    def share(self) -> None:
        """Write it to all others."""
        self.buffer.sums.share(self.buffer.place, self.first, self.numbers.numel())


@dataclass(frozen=True)
class PartPending:
    """What all ranks of a host have to bring: their gradients, which whoever waits then adds up, or their shares.

    `scale`: what gradients are multiplied by; None for shares.
    """

    part: Part
    scale: float | None
    look: Look

    def wait(self, timeout: timedelta) -> Tensor:
        """The sum of this rank's share, or the bucket; RuntimeError where a rank ends or gives up, or at the time limit."""
        self.part.buffer.wait(self._place, timeout, self.look)
        if self.scale is None:
            return self.part.buffer.filled()
        self.part.sum(self.scale)
        return self.part.numbers

    @property
    def _place(self) -> int:
        return 2 * self.part.buffer.place + (self.scale is None)

    def expect_late_wait(self) -> None:
        """The counters note it anyway."""

    def arrived_at(self) -> float:
        """When the last rank's was there, by time.perf_counter."""
        return self.part.buffer.sums.since(self._place)

    def abandon(self) -> None:
        """Have all ranks of the host give it up."""
        self.part.buffer.sums.give_up()


class HostShares(Decorated):
    """Carries what the ranks of a host ask each other for of buckets that it has allocated, all else the inner transport.

    Until `arrange` has said that hosts have several ranks, it does nothing.
    """

    def __init__(self, inner: Transport, look: Look = nothing) -> None:
        super().__init__(inner)
        self._look, self._ranks, self._hopeful = look, 1, True
        self._buffers = WeakTensorKeyDictionary()  # by the tensor that stands for it
        self._parts: dict[int, Part] = {}  # under way, by the identity of their numbers

    def arrange(self, ranks_per_host: int) -> None:
        """From now on hosts have so many ranks."""
        if ranks_per_host != self._ranks:  # what there is was mapped for other hosts
            self._buffers, self._parts = WeakTensorKeyDictionary(), {}
        self._ranks = ranks_per_host
        super().arrange(ranks_per_host)

    @property
    def allocates(self) -> bool:
        """Until it was in vain."""
        return self._hopeful if self._ranks > 1 else self.inner.allocates

    def allocate(self, buckets: Sequence[Sequence[Tensor]]) -> Sequence[Tensor | None]:
        """Memory that all ranks of a host have mapped, or none for any: a rank that cannot has all others do without."""
        if self._ranks == 1:
            return self.inner.allocate(buckets)
        sizes = [sum(parameter.numel() for parameter in bucket) if fits(bucket) else 0 for bucket in buckets]
        types = [bucket[0].dtype for bucket, size in zip(buckets, sizes, strict=True) if size]
        made = iter(self._mapped([size for size in sizes if size], types))
        return [next(made, None) if size else None for size in sizes]

    def room_for(self, flat: Tensor) -> Tensor | None:
        """Memory for a bucket that does not lie in any of its own."""
        if self._ranks == 1 or flat in self._buffers or flat.dtype not in ADDED or flat.is_cuda or not flat.numel():
            return None
        return next(iter(self._mapped([flat.numel()], [flat.dtype])), None)

    def _mapped(self, sizes: Sequence[int], types: Sequence[torch.dtype]) -> list[Tensor]:
        if not (sizes and self._hopeful):
            return []
        segment = Segment(sizes, types, self.group, kind="SharedShares", ranks_per_host=self._ranks)
        try:
            made = segment.shared()
        finally:
            segment.close()
        self._hopeful = bool(made)
        self._buffers.update({buffer.flat: replace(buffer, flat=buffer.room) for buffer in made})  # or it would live on
        return [buffer.flat for buffer in made]

    def start(self, request: Request, channel: int) -> Reply:
        """Tell the others that gradients are there, or write this rank's share to them; or as the inner one."""
        tensor = request.tensor
        if isinstance(request, ReduceScatter) and request.scope == "host" and tensor in self._buffers:
            part = self._part(replace(self._buffers[tensor], flat=tensor), request.sizes)
            part.buffer.fill_room()
            part.arrive(shared=False)
            return PartPending(part, 1 / self._ranks if request.op == "mean" else 1.0, self._look)
        if isinstance(request, AllGather) and id(tensor) in self._parts:
            part = self._parts.pop(id(tensor))
            part.share()
            part.arrive(shared=True)
            return PartPending(part, None, self._look)
        return self.inner.start(request, channel)

    def _part(self, buffer: SharedBuffer[Shares], sizes: Sequence[int]) -> Part:
        place = self.group.rank() % self._ranks
        first = sum(sizes[:place])
        part = Part(buffer, first, buffer.room[first : first + sizes[place]])
        self._parts[id(part.numbers)] = part
        return part

    def abort(self) -> None:
        """Have no rank wait for this one any more."""
        self._parts = {}
        for buffer in self._buffers.values():
            buffer.sums.give_up()
        self.inner.abort()
