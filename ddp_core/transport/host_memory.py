"""Where all ranks share a machine, buckets may lie in memory that they all have mapped: sums there need no sockets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...compress.protocol import AllReduce, Request
from .agreement import Look, nothing
from .host_segment import Segment
from .protocol import Decorated, Reply, Transport
from .shared_buffer import SharedBuffer, SharedSum, Sums

ADDED = (torch.float32, torch.float64)  # what the extension can add up


class HostMemory(Decorated):
    """Sums of the buckets that it has allocated go through shared memory, all else over the inner transport.

    Where hosts have several ranks, told by `arrange`, the inner one allocates.
    """

    def __init__(self, inner: Transport, look: Look = nothing) -> None:
        super().__init__(inner)
        self._look, self._one_level = look, True
        self._hopeful = self.group.size() > 1  # not known to be in vain
        self._buffers: dict[int, SharedBuffer[Sums]] = {}  # by the identity of the tensor that stands for it

    def arrange(self, ranks_per_host: int) -> None:
        """From now on hosts have so many ranks."""
        self._one_level = ranks_per_host == 1
        super().arrange(ranks_per_host)

    @property
    def allocates(self) -> bool:
        """Until it was in vain."""
        return self._hopeful if self._one_level else self.inner.allocates

    def allocate(self, buckets: Sequence[Sequence[Tensor]]) -> Sequence[Tensor | None]:
        """Memory that all ranks have mapped, or none for any: a rank that cannot has the others do without.

        What was allocated before goes first, so that both never use memory.
        """
        self._buffers = {}
        if not self._one_level:
            return self.inner.allocate(buckets)
        sizes = [sum(parameter.numel() for parameter in bucket) if fits(bucket) else 0 for bucket in buckets]
        types = [bucket[0].dtype for bucket, size in zip(buckets, sizes, strict=True) if size]
        made = self._mapped([size for size in sizes if size], types) if types and self._hopeful else []
        self._hopeful = bool(made)
        self._buffers = {id(buffer.flat): buffer for buffer in made}
        tensors = iter([buffer.flat for buffer in made])
        return [next(tensors, None) if size else None for size in sizes]

    def _mapped(self, sizes: Sequence[int], types: Sequence[torch.dtype]) -> Sequence[SharedBuffer[Sums]]:
        segment = Segment(sizes, types, self.group)
        try:
            return segment.shared()
        finally:
            segment.close()

    def start(self, request: Request, channel: int) -> Reply:
        """Begin a sum in shared memory, each rank as soon as it likes; or what else it is, as the inner one does."""
        buffer = self._buffers.get(id(request.tensor))
        if buffer is not None and isinstance(request, AllReduce) and request.op == "sum":
            buffer.fill_room()
            buffer.sums.arrive(buffer.place)
            return SharedSum(buffer, self._look)
        return self.inner.start(request, channel)

    def abort(self) -> None:
        """Have no rank wait for this one any more."""
        for buffer in self._buffers.values():
            buffer.sums.give_up()
        self.inner.abort()


def fits(bucket: Sequence[Tensor]) -> bool:
    """Whether a bucket of these parameters can be added up in shared memory."""
    return bool(bucket) and bucket[0].device.type == "cpu" and bucket[0].dtype in ADDED
