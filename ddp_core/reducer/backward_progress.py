"""The rules of a synchronized backward, and its progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..buckets.slices import Sendable
from ..measure.step import Step
from .unused_parameters import Usage


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
