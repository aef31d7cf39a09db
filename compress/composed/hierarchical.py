"""Two levels for hosts of several ranks: exact sums inside a host, another method between hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ...kernels import Residual
from ..algorithms.dense import Dense
from ..protocol.compressor import Compressor, Traits, children, traits_of
from ..protocol.layout import Layout, working_dtype
from ..protocol.registry import register
from ..protocol.requests import AllGather, AllReduce, Program, ReduceScatter, next_request
from ..simulate import most_rounds
from ..state.leaf import FlatLeaf, Versions
from ..state.shares import Share, placed_on_hosts, ranks_given, share_of
from ..state.tensors import Chunk, PerParameter
from ..state.tree import Leaves, leaves


@dataclass
class HierarchicalState:
    """This rank's share, None where hosts have one rank each; the inner state; the rounds that all of a host's ranks take.

    `elsewhere`: empty leaves for what the host's other ranks have and this one lacks, by path: a saved state of other
    buckets finds its fields there. `keeps`: what the inner method holds back of the share, where it does; there goes what
    rounding to 16 bits loses.
    """

    share: Share | None
    inner: Any
    rounds: int = 0
    elsewhere: dict[str, FlatLeaf] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numel = -1 if self.share is None else self.share.sizes[self.share.whole.ranks.place]
        held = (leaf for leaf in Leaves(self.inner).residuals if isinstance(leaf, PerParameter))
        self.keeps = next((leaf for leaf in held if leaf.numel == numel), None)


def _traits(hosts: Hierarchical) -> Traits:
    """Whole parameters are dealt by name."""
    return Traits(by_name=not traits_of(hosts.inner).ignores_shapes, ranks_per_host=hosts.ranks or 0)


@register("hosts", lossy=False, traits=_traits)
@dataclass(frozen=True)
class Hierarchical:
    """Exact sums inside each host; between hosts the inner method, each rank of a host for its share of a bucket.

    A reduce-scatter inside the host, the inner method among the ranks of one place on every host, an all-gather inside the
    host (hierarchical all-reduce: Jia et al. 2018, "Highly Scalable Deep Learning Training System"). Residuals and
    arithmetic are divided among the ranks of a host. A method that looks at matrices is dealt whole parameters. On a single
    host the average is exact. `ranks`: of each host, consecutive ones; without it machines are told apart.
    """

    inner: Compressor = Dense()
    ranks: int | None = None

    def __post_init__(self) -> None:
        if self.ranks is not None and self.ranks < 1:
            raise ValueError(f"hosts:ranks is at least 1, got {self.ranks}")
        if any(ranks_given(child) is not None for child in children(self)):
            raise ValueError("there are two levels, hosts and their ranks: write hosts+ once")

    def init(self, layout: Layout) -> HierarchicalState:
        """The inner state for this rank's share."""
        layout = dataclasses.replace(layout, ranks=placed_on_hosts(self, layout.ranks))
        if layout.ranks.per_host == 1:
            return HierarchicalState(None, self.inner.init(layout))
        share = share_of(layout, cut=traits_of(self.inner).ignores_shapes)
        shares = [share.at(place).widened() for place in range(layout.ranks.per_host)]
        alone = layout.ranks.hosts == 1
        rounds = 0 if alone or not layout.numel else most_rounds(self.inner, [each for each in shares if each.numel])
        mine = shares[layout.ranks.place]
        inner = self.inner.init(mine) if rounds and mine.numel else None
        return HierarchicalState(share, inner, rounds, self._elsewhere(inner, shares) if rounds else {})

    def _elsewhere(self, inner: Any, shares: Sequence[Layout]) -> dict[str, FlatLeaf]:
        """Empty leaves at the paths of the other shares' states that this one lacks."""
        own, found = {path for path, _ in leaves(inner)}, dict[str, FlatLeaf]()
        for other in filter(lambda share: share.numel, shares):
            state = self.inner.init(dataclasses.replace(other, device=torch.device("meta")))
            missing = ((path, leaf) for path, leaf in leaves(state) if path not in own)
            found |= {f"inner.{path}": _emptied(leaf, other) for path, leaf in missing if isinstance(leaf, FlatLeaf)}
        return found

    def reduce(self, grad: Tensor, state: HierarchicalState, residual: Residual | None = None) -> Program[Tensor]:
        """The average over all ranks; inside a host nothing is lost, but for what 16 bits cannot hold of it."""
        if state.share is None:
            return (yield from self.inner.reduce(grad, state.inner, residual))
        if not grad.numel():
            return grad
        wide = grad.to(working_dtype(grad.dtype))
        if residual is not None:
            wide.add_(residual.before)
            residual.after.zero_()
        share = yield ReduceScatter(wide, "mean", "host", state.share.sizes)
        yield from self._average(share, state)
        if grad.dtype == share.dtype:
            return (yield AllGather(share, "host", state.share.sizes, within=wide))
        narrow = torch.empty_like(share, dtype=grad.dtype)
        held = None if state.keeps is None else state.keeps.open()
        kernels.cast_scaled(share, narrow, 1.0, None if held is None else held.in_place())
        if state.keeps is not None and held is not None:
            state.keeps.close(held)
        del wide, share  # their memory is free while the others travel
        return (yield AllGather(narrow, "host", state.share.sizes))

    def _average(self, share: Tensor, state: HierarchicalState) -> Program[None]:
        """The inner average of the share over hosts, in place, in as many rounds as the host's other ranks take."""
        done = 0
        if share.numel() and state.rounds:
            average, done = yield from _across(self.inner.reduce(share, state.inner))
            if average is not share:
                share.copy_(average)
        for _ in range(state.rounds - done):
            yield AllReduce(torch.zeros(1, device=share.device), scope="self")


def _emptied(leaf: FlatLeaf, share: Layout) -> FlatLeaf:
    """A leaf of the same kind that has numbers of no parameter."""
    nothing = share.select(())
    if not isinstance(leaf, PerParameter | Chunk):
        return PerParameter.zeros(nothing)
    empty = torch.zeros(0, dtype=leaf.dtype, device=share.device)
    return dataclasses.replace(leaf, layout=nothing, versions=Versions(empty), store=None)


def _across(program: Program[Tensor]) -> Program[tuple[Tensor, int]]:
    """A program's result, its requests made to the other hosts; and how many they were."""
    reply, rounds = None, 0
    try:
        while True:
            request, result = next_request(program, reply)
            if request is None:
                return result, rounds
            reply = yield dataclasses.replace(request, scope="across")
            rounds += 1
    finally:
        program.close()
