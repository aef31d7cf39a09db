"""When buckets are made anew: by the order in which gradients get ready (Li et al. 2020, section 6.2.1), or a state's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..averaging.averager import CompressedAverager
from ..buckets.assignment import Allocate, BucketAssignment, allocate_own
from ..transport.protocol import Transport
from ..transport.rank_messages import broadcast

INTERVAL = 64  # synced steps between two looks
BROKEN_OFF = (
    "making the buckets anew broke off with an error, so the ranks no longer have the same ones: load a checkpoint into a "
    "new DistributedDataParallel"
)


class BucketOrder:
    """Decides between steps, on all ranks alike, whether the buckets of `assignment` are made anew.

    `names`: of the parameters. `device`: of what ranks tell each other. `drain`: waits for averages that are not handed out
    yet, before the buckets are made anew.
    """

    def __init__(
        self,
        assignment: BucketAssignment,
        names: Sequence[str],
        transport: Transport,
        device: torch.device,
        drain: Callable[[], None] = lambda: None,
    ) -> None:
        self._assignment, self._names = assignment, names
        self._transport, self._device = transport, device
        self._looked_at = 0
        self._followed_at: int | None = None  # when a state brought buckets, while these have memory of their own
        self.agreed = False  # rank 0 has told its order once
        self._captured = False  # a CUDA graph writes to the buckets whenever it is replayed
        self._kept: list[Tensor] = []  # buffers of former buckets that a graph may write to
        self._making = False  # buckets, in a place where an error would leave this rank with others than the rest
        self.drain = drain

    def update(self, steps: int, averager: CompressedAverager | None, *, hooked: bool, dynamic: bool) -> None:
        """Once after the first step and now and then: take rank 0's order. `steps`: so far.

        `averager`: the compression that averages. Without one a hook does that is not ours, and may know buckets by their
        numbers: these then stay as in torch. `hooked`: a hook calls the compression. `dynamic`: unused parameters are
        looked for. Raises RuntimeError on a rank whose last new buckets were not finished.
        """
        if self._making:
            raise RuntimeError(BROKEN_OFF)
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured = True  # and nothing is asked for, which the host would have to read
            return
        own = None if hooked else averager
        saved = averager.loaded_order() if averager is not None else ()
        due = steps not in (0, self._looked_at) and (steps == 1 or steps % INTERVAL == 0)
        if due and averager is not None:
            averager.engines.agreement.compare(self._transport, follows=bool(saved))
        if saved:
            self._follow(saved)
            self._looked_at = max(1, steps)  # the first step was before the checkpoint
            self._followed_at = steps
        elif self._followed_at is not None and steps > self._followed_at:  # all ranks have come as far
            self._followed_at = None
            self._rebuild(self._assignment.order, self._allocator(own))
        if saved or not due:
            return
        self._looked_at = steps
        if averager is None and (self.agreed or dynamic):
            return
        order = torch.tensor(self._assignment.proposal(), device=self._device)
        broadcast([order], 0, self._transport, what="the order of buckets")
        self.agreed = True
        self._rebuild(order.tolist(), self._allocator(own))

    def _allocator(self, averager: CompressedAverager | None) -> Allocate:
        return allocate_own if averager is None else averager.allocator(self._device)

    def _follow(self, names: Sequence[str]) -> None:
        """Make the buckets that a state was saved with, as far as their sizes allow."""
        places = {name: index for index, name in enumerate(self._names)}
        saved = [places[name] for name in dict.fromkeys(names) if name in places]
        others = [index for index in self._assignment.order if index not in set(saved)]
        self._rebuild([*saved, *others], allocate_own)

    def _rebuild(self, order: list[int], allocate: Allocate) -> None:
        if order != self._assignment.order or not (self._assignment.shared or allocate is allocate_own):
            self._build(order, allocate)

    def resize(self, size: int, allocate: Allocate, *, cut: bool) -> None:
        """Make the buckets anew, of another size in bytes; all ranks do so between the same steps.

        `cut`: those that are larger, as with a large parameter, are sent in slices of that size.
        """
        self._assignment.caps, self._assignment.cut = [size], size if cut else None
        self._build(self._assignment.order, allocate)

    def _build(self, order: list[int], allocate: Allocate) -> None:
        self._making = True
        self.drain()
        if self._captured:
            self._kept += [bucket.buffer() for bucket in self._assignment.buckets]
        self._assignment.build(order, allocate)
        self._making = False
