"""Buckets in memory that the ranks of a machine have mapped: arithmetic there needs no sockets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...compress.protocol.requests import AllGather, AllReduce, ReduceScatter, Request
from .agreement import Check, nothing
from .host_segment import Segment
from .protocol import Decorated, Reply, Transport
from .shared_buffer import Share, SharedBuffer, SharedReply

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
        made = Segment(sizes, types, self.group, kind, count).shared() if sizes and self.allocates else []
        if sizes and not made:
            self._in_vain.add(here)
        self._buffers[here].update(made)
        return [flat for flat, _ in made]

    def start(self, request: Request, channel: int) -> Reply:
        """Tell the others that numbers are there, each rank as soon as it likes; or what else it is, as the inner one."""
        tensor = request.tensor
        if isinstance(request, AllReduce) and request.op == "sum" and (buffer := self._buffers[1].get(tensor)):
            buffer.fill(tensor)
            return SharedReply(buffer, buffer.place, partial(buffer.filled, tensor), self._check)
        hosts = self._buffers[self.ranks.per_host]
        if isinstance(request, ReduceScatter) and request.scope == "host" and (buffer := hosts.get(tensor)):
            return self._sum_share(buffer, request)
        if isinstance(request, AllGather) and (share := self._shares.pop(id(tensor), None)):
            share.write()
            finish = partial(share.buffer.filled, share.flat)
            return SharedReply(share.buffer, 2 * share.buffer.place + 1, finish, self._check)
        return self.inner.start(request, channel)

    def _sum_share(self, buffer: SharedBuffer, request: ReduceScatter) -> Reply:
        place, scale = self.ranks.place, 1 / self.ranks.per_host if request.op == "mean" else 1.0
        first = sum(request.sizes[:place])
        share = Share(buffer, request.tensor, first, buffer.memory[first : first + request.sizes[place]])
        self._shares[id(share.numbers)] = share
        buffer.fill(share.flat)
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


def fits(bucket: Sequence[Tensor]) -> bool:
    """Return True if a bucket of these parameters can be added up in shared memory."""
    return bool(bucket) and bucket[0].device.type == "cpu" and bucket[0].dtype in ADDED
