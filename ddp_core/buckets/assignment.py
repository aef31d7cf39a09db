"""The assignment of parameters to buckets, and the sizes of these (Li et al. 2020, section 3.2.3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any, TypeAlias

from torch import Tensor

from .grad_bucket import GradBucket, grad_bytes, grad_dtype
from .slices import MUCH, CutBucket, Sendable
from .sparse import SparseBucket

MEBIBYTE = 1024 * 1024
DEFAULT_CAP_MB = 25.0
DEFAULT_FIRST_CAP = MEBIBYTE  # bytes; as torch's default: the first bucket leaves early
Allocate: TypeAlias = Callable[[Sequence[Sequence[Tensor]]], Sequence[Tensor | None]]  # of buckets of these parameters


def allocate_own(buckets: Sequence[Sequence[Tensor]]) -> Sequence[None]:
    """Each bucket makes its own memory."""
    return [None] * len(buckets)


def caps_in_bytes(bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None = None) -> list[int]:
    """The cap of each bucket in the order sent; the last one holds for all that follow.

    None is torch's default: 1 MiB, then 25 MiB. An explicit size holds for the first bucket too.

    >>> caps_in_bytes(None), caps_in_bytes(10), caps_in_bytes(None, [1, 4])
    ([1048576, 26214400], [10485760], [1048576, 4194304])
    """
    if bucket_cap_mb is not None and bucket_cap_mb_list is not None:
        raise ValueError("bucket_cap_mb and bucket_cap_mb_list exclude each other: one size, or one a bucket")
    sizes: Sequence[Any] = bucket_cap_mb_list if bucket_cap_mb_list is not None else [bucket_cap_mb]
    if bucket_cap_mb is None and bucket_cap_mb_list is None:
        return [DEFAULT_FIRST_CAP, int(DEFAULT_CAP_MB * MEBIBYTE)]
    if not sizes or not all(isinstance(size, Real) and 0 < float(size) < float("inf") for size in sizes):
        raise ValueError(f"the size of a bucket is a number of MiB above 0, got {list(sizes)}")
    return [int(size * MEBIBYTE) for size in sizes]


def assigned(parameters: Sequence[Tensor], caps: Sequence[int], alone: Sequence[bool]) -> list[list[int]]:
    """The indices of each bucket's members, buckets in the order in which their last member comes.

    Members share the device and the dtype of gradients; a bucket closes with the member that fills it. Those marked `alone`
    (sparse gradients) have a bucket each.
    """
    buckets: list[list[int]] = []
    filling: dict[object, list[int]] = {}
    room: dict[object, float] = {}
    limits: dict[object, Iterator[int]] = {}
    for index, parameter in enumerate(parameters):
        if alone[index]:
            buckets.append([index])
            continue
        key = (grad_dtype(parameter), parameter.device)
        if key not in filling:
            filling[key] = []
            room[key] = next(limits.setdefault(key, iter(caps)), caps[-1])
        filling[key].append(index)
        room[key] -= grad_bytes(parameter)
        if room[key] <= 0:
            buckets.append(filling.pop(key))
    return sorted([*buckets, *filling.values()], key=lambda members: members[-1])


class BucketAssignment:
    """The buckets of `parameters`, in the order in which gradients are expected to get ready: first the last one's.

    `sparse`: which parameters get sparse gradients. `alias`: gradients become views of the buckets. `allocate`: makes
    the memory of the first buckets.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        sparse: Sequence[bool],
        caps: Sequence[int],
        *,
        alias: bool,
        allocate: Allocate = allocate_own,
    ) -> None:
        self._parameters, self._sparse, self.caps, self.alias = parameters, sparse, caps, alias
        self.traces: deque[list[int]] = deque(maxlen=2)  # in which order the gradients of the last steps got ready
        self.builds = 0  # how often buckets were made
        self.cut: int | None = None  # bytes of a slice of larger buckets; None where they are sent as they are
        self.shared = False  # whether any lies in memory that was given
        self.buckets: list[GradBucket] = []
        self.build(range(len(parameters))[::-1], allocate)

    def build(self, order: Sequence[int], allocate: Allocate = allocate_own) -> None:
        """Make the buckets for parameters that get ready in this order. All ranks do so between the same steps."""
        for bucket in self.buckets:
            bucket.slices = ()  # which refer to it
        self.buckets = []  # the old ones go first, so that both never use memory
        self.bucket_of: list[GradBucket] = []
        self.sending: list[Sendable] = []  # them, or their slices, in the order in which they leave
        self.builds += 1
        self.order = list(order)
        ready = [self._parameters[index] for index in order]
        positions = assigned(ready, self.caps, [self._sparse[index] for index in order])
        members = [[self.order[position] for position in bucket] for bucket in positions]
        given = allocate([self._shareable(each) for each in members])
        self.shared = any(memory is not None for memory in given)
        last = len(members) - 1
        self.buckets = [self._bucket(n, each, given[n], last=n == last) for n, each in enumerate(members)]
        self.sending = [each for bucket in self.buckets for each in bucket.slices or (bucket,)]
        for place, each in enumerate(self.sending):
            each.place = place
        places = {index: bucket for bucket in self.buckets for index in bucket.members}
        self.bucket_of = [places[index] for index in range(len(places))]
        self.unready = [len(bucket.members) for bucket in self.buckets]  # parameters whose gradient is not ready

    def _shareable(self, members: Sequence[int]) -> list[Tensor]:
        """The parameters of a bucket that may lie in memory of others, which these make in their dtype; else none."""
        first = self._parameters[members[0]]
        if self._sparse[members[0]] or grad_dtype(first) != first.dtype:
            return []
        return [self._parameters[index] for index in members]

    def _bucket(self, place: int, members: Sequence[int], memory: Tensor | None, *, last: bool) -> GradBucket:
        parameters = [self._parameters[index] for index in members]
        if self._sparse[members[0]]:
            return SparseBucket(place, members, parameters, last=last)
        size = sum(map(grad_bytes, parameters))
        if self.cut is None or memory is not None or size <= MUCH * self.cut:
            return GradBucket(place, members, parameters, last=last, alias=self.alias, memory=memory)
        bucket = CutBucket(place, members, parameters, last=last, alias=self.alias)
        bucket.cut(-(-size // self.cut))
        return bucket

    def send_in(self, order: Sequence[int]) -> None:
        """Let what is sent leave in this order of its indices. All ranks do so between the same steps."""
        by_index = {each.index(): each for each in self.sending}
        self.sending = [by_index[index] for index in order]

    def proposal(self) -> list[int]:
        """The order for the next buckets: that of the first step, later a new one where it has changed for good.

        For good: the last two steps agree, and the buckets do not get complete in the order in which they are sent.
        """
        before, last = [[], [], *self.traces][-2:]  # parameters without a gradient are missing
        seen = set(last)
        order = last + [index for index in self.order if index not in seen]
        place = {index: position for position, index in enumerate(order)}
        complete = [max(place[index] for index in bucket.members) for bucket in self.buckets]
        changed = last == before and complete != sorted(complete)
        return order if changed or not before else self.order
