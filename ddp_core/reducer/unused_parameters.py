"""The parameters that any rank used in a step (Li et al. 2020, 3.2.3). `GradBucket` has what follows for gradients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, cached_property

import torch

from ...compress import AllReduce
from ..buckets.slices import Sendable
from ..transport.protocol import Transport
from ..transport.rank_messages import telling


@dataclass(frozen=True)
class Rules:
    """`caps`: of buckets, in bytes. The others are arguments of DistributedDataParallel."""

    caps: Sequence[int]
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    skip_all_reduce_unused_params: bool = False

    def shared(self) -> list[str]:
        """Return the arguments that must be alike on all ranks, a line each."""
        names = ("find_unused_parameters", "static_graph", "skip_all_reduce_unused_params")
        return [f"buckets of {list(self.caps)} bytes", *(f"{name}={getattr(self, name)}" for name in names)]

    @cached_property
    def dynamic(self) -> bool:
        """True if each backward may reach other parameters."""
        return self.find_unused_parameters and not self.static_graph


class Usage:
    """The sum over ranks of `mine`: by index, 1 for the parameters that this rank used, else 0.

    `Reducer._used` has these, of all backwards since the last synchronization, and a step adds what it is about to reach.
    Made by all ranks at the same place between the same buckets. It is on its way at once, and waited for where the
    answer matters; on CUDA a stream of its own keeps that wait off the backward's kernels.
    """

    def __init__(self, mine: Sequence[int], transport: Transport, device: torch.device, timeout: timedelta) -> None:
        self._mine, self._group, self._timeout = bytes(mine), transport.group, timeout
        self._all_here = all(mine)
        self._stream = _side_stream(device) if device.type == "cuda" else None
        with self._on_stream():
            told = torch.tensor(list(mine), dtype=torch.int32, device="cpu", pin_memory=self._stream is not None)
            self._pending = transport.message(AllReduce(told.to(device, non_blocking=True), "sum"))

    def by_any(self) -> Sequence[int]:
        """By index, above 0 for the parameters that any rank used. Waits, unless this rank used all."""
        return self._mine if self._all_here else self.counts

    @cached_property
    def counts(self) -> Sequence[int]:
        """By index, how many ranks used a parameter. Waits."""
        with self._on_stream(), telling("the parameters that they used", self._group):
            return self._pending.wait(self._timeout).tolist()

    def keeps(self, bucket: Sendable, *, skips: bool) -> bool:
        """Leave out of a bucket the parameters that no rank used (section 6.2.2). Return True if the bucket is sent.

        `skips`: a bucket is not sent if no rank used any of its parameters.
        """
        used = self.by_any()
        absent = [index for index in bucket.members if not used[index]]
        if skips and len(absent) == len(bucket.members):
            return False
        if absent:
            bucket.leave_out(absent)
        return True

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # without priority: it copies and waits, and has no kernels
