"""The rules and the state of a synchronized backward, and the parameters that any rank used (Li et al. 2020, 3.2.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, cached_property

import torch

from ...compress import AllReduce
from ..buckets.slices import Sendable
from ..measure.step import Step
from ..transport.collectives import telling
from ..transport.protocol import Transport


class Usage:
    """The sum over ranks of `mine`: by index, 1 for the parameters that this rank used, else 0.

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

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@dataclass(frozen=True)
class Rules:
    """`caps`: of buckets, in bytes. The others are arguments of DistributedDataParallel."""

    caps: Sequence[int]
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    skip_all_reduce_unused_params: bool = False

    @cached_property
    def dynamic(self) -> bool:
        """True if each backward may reach other parameters."""
        return self.find_unused_parameters and not self.static_graph


@dataclass
class Backward:
    """The progress of one synchronized backward."""

    missing: list[int]  # firings of each parameter's hook until its gradient is ready; below 0 there were too many
    counts: bool  # it is the first of a static graph, which waits for its end
    started: bool  # what it will reach is known, or does not matter
    asks: bool  # ranks tell each other which parameters they used
    skips: bool  # what no rank used is not sent
    leaves_out: bool  # that, or zeros stand for old gradients of what no rank used
    used_by_any: Callable[[], Sequence[int]] | None  # by index, not 0 for those; None where nobody asks, or not yet
    step: Step = field(default_factory=Step)  # the record of it
    order: list[int] = field(default_factory=list)
    undefined: set[int] = field(default_factory=set)  # parameters whose hook fired with no gradient
    launched: int = 0
    ending: bool = False
    usage: Usage | None = None
    over: bool = False  # it waits for the averages, or has them
    broken: str = ""  # why there is an average that did not come

    @property
    def under_way(self) -> bool:
        """True if other ranks may have received something of it."""
        return bool(self.order or self.launched or self.usage or self.broken)

    def absent(self, names: Sequence[str]) -> dict[int, str]:
        """The parameters without gradient, by index; `names`: of all."""
        return {index: name for index, name in enumerate(names) if self.missing[index] > 0}

    def fails(self, error: BaseException) -> None:
        """Keep for the next iteration why averages did not come."""
        self.broken = str(error) or type(error).__name__

    def needs(self, bucket: Sendable) -> bool:
        """Return True if a bucket is sent; parts of it that no rank used are taken out (section 6.2.2)."""
        if self.used_by_any is None:
            return True
        used = self.used_by_any()
        absent = [index for index in bucket.members if not used[index]]
        if self.skips and len(absent) == len(bucket.members):
            return False
        if absent:
            bucket.leave_out(absent)
        return True

    def firings(self) -> list[int]:
        """Return how often each parameter fired in the first backward of a static graph, which now sends them all.

        The order keeps the last firings.
        """
        counted = [1 - missing for missing in self.missing]
        self.missing = [1] * len(counted)
        self.order = list(dict.fromkeys(reversed(self.order)))[::-1]
        return counted
