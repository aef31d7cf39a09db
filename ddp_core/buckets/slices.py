"""A bucket that is too large to be sent at once: its buffer travels in slices, which wait for each other nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

from torch import Tensor

from ...compress import Layout
from ..transport.protocol import Pending
from .grad_bucket import GradBucket
from .protocol import FlatBucket

MUCH = 1.5  # times the size of a slice: what is cut
ALIGNED = 512  # elements: slices begin at multiples of so many


class CutBucket(GradBucket):
    """A bucket whose buffer is sent in `slices`. Its parameters are ready together, and are handed out together.

    All members are always sent: see `BucketAssignment.cut`.
    """

    slices: Sequence[BucketSlice]

    def cut(self, count: int) -> None:
        """Cut the buffer into so many slices of about one size."""
        size = -(-self._memory.numel() // count)
        size += -size % ALIGNED
        starts = range(0, self._memory.numel(), size)
        self.slices = [BucketSlice(self, self._memory[start : start + size], start) for start in starts]

    def open(self, scale: float) -> None:
        """Make ready for a step's gradients."""
        super().open(scale)
        self._full = False

    def fill(self, used: Sequence[int]) -> None:
        """Copy the gradients in, for the first slice that leaves."""
        if not self._full:
            self._full = True
            super().fill(used)

    @property
    def pending(self) -> Pending | None:
        """The average of the whole, once slices are on their way."""
        sent = [each for each in self.slices if each.pending is not None]
        return SlicesPending(self._memory, sent) if sent else None

    @pending.setter
    def pending(self, none: Pending | None) -> None:
        for each in self.slices:
            each.pending = none


class BucketSlice(FlatBucket):
    """A slice of a bucket, from element `start` on, as what sends it knows it: see GradBucket."""

    def __init__(self, bucket: CutBucket, flat: Tensor, start: int) -> None:
        self.bucket, self.flat, self.start = bucket, flat, start
        self.members, self.number, self.place = bucket.members, bucket.number, 0
        self.all_parameters = bucket.all_parameters
        self.plan: Any = None
        self.pending: Pending | None = None
        self.fill, self.sparse_members = bucket.fill, bucket.sparse_members

    @property
    def absent(self) -> list[int]:
        """The members of the bucket that had no gradient when it was filled."""
        return self.bucket.absent

    @property
    def views(self) -> list[Tensor]:
        """Each member's part of the bucket's buffer."""
        return self.bucket.views

    @property
    def scale(self) -> float:
        """The factor of gradients on their way in."""
        return self.bucket.scale

    def is_last(self) -> bool:
        """Return True for the last slice of the last bucket."""
        return self.bucket.is_last() and self is self.bucket.slices[-1]

    def clear(self) -> None:
        """Zeros, for a rank that has no gradients to give."""
        self.flat.zero_()

    def leave_out(self, members: Sequence[int]) -> None:
        """A slice is never sent in part."""

    def layout(self, whole: Layout) -> Layout:
        """Return the layout of this slice. `whole`: the layout of its bucket."""
        reals = 2 if self.flat.is_complex() else 1
        start, end = self.start * reals, (self.start + self.flat.numel()) * reals
        names, shapes, starts, rows = [], [], [], []
        for name, offset, size, row in zip(whole.names, whole.offsets, whole.sizes, whole.rows, strict=True):
            first, last = max(start, offset), min(end, offset + size)
            if first < last:
                names.append(name)
                shapes.append((last - first,))
                starts.append(first - offset)
                rows.append(row)
        place = (whole.dtype, whole.device, whole.ranks)
        return Layout(tuple(names), tuple(shapes), *place, tuple(starts), tuple(rows))


@dataclass(frozen=True)
class SlicesPending:
    """The slices of a bucket, on their way."""

    memory: Tensor
    slices: Sequence[BucketSlice]

    def wait(self, timeout: timedelta) -> Tensor:
        """The bucket's buffer, when all slices are there."""
        for each in self.slices:
            assert each.pending is not None
            average = each.pending.wait(timeout)
            if average.data_ptr() != each.flat.data_ptr():
                each.flat.copy_(average)
        return self.memory


Sendable: TypeAlias = GradBucket | BucketSlice  # what leaves at once
