"""The traffic and memory of a step of FSDP2 with compressors, before anything is trained."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import torch
from torch import Tensor

from ..compress import Ranks, Spec, Traffic
from ..compress.protocol.requests import Request
from ..compress.shards.layout import ShardLayout
from ..compress.shards.reduction import ShardSum, shard_sum
from ..compress.shards.requests import gather_program, gather_requests, reduce_program, reduce_requests, rows_of_step
from ..compress.shards.weights import WeightGather, weight_gather
from ..compress.simulate import WorkMemory, memory_of, traffic
from ..compress.state.shares import placed_on_hosts
from ..ddp_core import layout_of
from ..ddp_core.engine.in_flight import MODULES_IN_FLIGHT
from .bucket_plan import META, Plan


@dataclass(frozen=True)
class Policy:
    """The dtypes that FSDP2 sends: of weights and of gradients, as a `MixedPrecisionPolicy` names them."""

    param_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Shards:
    """The modules of an FSDP2 model, the root behind the others, and what their weights and gradients travel as."""

    layouts: Sequence[ShardLayout]
    weights: WeightGather
    reduction: ShardSum
    policy: Policy = Policy()

    @classmethod
    def of(
        cls,
        parts: Sequence[Mapping[str, Tensor]],
        gather: Spec,
        reduce: Spec,
        ranks: Ranks,
        policy: Policy = Policy(),
    ) -> Shards:
        """Return them as `plan_sharded` takes them. Raises ValueError for a compressor that is refused."""
        weights, reduction = weight_gather(gather), shard_sum(reduce)
        sizes = [
            1 if each.hosts is None else placed_on_hosts(each.hosts, ranks).per_host for each in (weights, reduction)
        ]
        unnamed = [dict(zip(map(str, count()), part.values(), strict=False)) for part in parts if part]
        wholes = [layout_of(part, torch.float32, META, replace(ranks, per_host=1)) for part in unnamed]
        layouts = [ShardLayout(whole, (0,) * len(whole.names)) for whole in wholes]
        placed = weights.placed(sizes[0], ranks.world_size), reduction.placed(sizes[1], ranks.world_size)
        return cls(layouts, *placed, policy)

    def gather(self, layout: ShardLayout) -> Iterator[Request]:
        """Return the requests of a module's gather."""
        return gather_requests(layout, self.weights, self.policy.param_dtype)

    def reduce(self, layout: ShardLayout) -> Iterator[Request]:
        """Return the requests of a module's reduction."""
        return reduce_requests(layout, self.reduction, self.policy.reduce_dtype)

    def traffic(self, micro_batches: int = 1) -> Traffic:
        """Return the traffic of a step: reductions, and two gathers of each module and micro-batch.

        The root and differences are gathered once in a micro-batch.
        """
        total, each = Traffic(), functools.cache(self._traffic_of)
        for layout in self.layouts:
            again = layout is not self.layouts[-1] and not self.weights.differences
            gathered, reduced = each(layout)
            total = sum([*gathered] * (micro_batches * (1 + again)) + [*reduced], total)
        return total

    def _traffic_of(self, layout: ShardLayout) -> tuple[list[Traffic], list[Traffic]]:
        """Return the traffic of each request of a module's gather, and of its reduction."""
        gathers, reductions = (
            replace(layout.whole.ranks, per_host=each.per_host) for each in (self.weights, self.reduction)
        )
        return (
            [traffic(request, gathers) for request in self.gather(layout)],
            [traffic(request, reductions) for request in self.reduce(layout)],
        )


def plan_sharded(
    parts: Sequence[Mapping[str, Tensor]],
    gather: Spec,
    reduce: Spec,
    *,
    world_size: int,
    ranks_per_host: int = 1,
    policy: Policy = Policy(),
    micro_batches: int = 1,
) -> Plan:
    """Compute the traffic of a step by a dry run: forward and backward of each micro-batch, and one synchronization.

    Args:
        parts: the parameters of each module that `fully_shard` is applied to; the root, which keeps its weights until
            backward, is the last one.
        gather: the compressor of weights.
        reduce: the compressor of gradients.
        world_size: the number of ranks.
        ranks_per_host: the number of ranks on each host, for `hosts+` compressors.
        policy: the dtypes that are sent.
        micro_batches: those that a step accumulates.

    Returns:
        The traffic and memory of one rank. `compression_ratio` is against "none" for both, `work_bytes` is beyond the
        memory of torch's own communication.

    Raises:
        ValueError: a compressor is refused.
    """
    ranks = Ranks(world_size, 0, ranks_per_host)
    now, before = (Shards.of(parts, *pair, ranks, policy) for pair in ((gather, reduce), ("none", "none")))
    layouts, weights, reduction = now.layouts, now.weights, now.reduction
    elements = sum(each.numel() for part in parts for each in part.values())
    kept = functools.cache(partial(_state_bytes, weights=weights, reduction=reduction, policy=policy))
    state = sum(map(kept, layouts))
    work = _shard_work_bytes(layouts, weights, reduction, policy)
    sent, usual = (each.traffic(micro_batches) for each in (now, before))
    return Plan.of(f"{gather}/{reduce}", elements, world_size, sent, usual, state, work)


def _state_bytes(layout: ShardLayout, weights: WeightGather, reduction: ShardSum, policy: Policy) -> int:
    residual = reduction.init(layout).residual
    own = 2 * rows_of_step(layout).flat.nbytes  # for checkpoints, before and after a step
    held = policy.param_dtype.itemsize * layout.numel + own if weights.differences else 0
    return held + (0 if residual is None else residual.flat.nbytes)


def _shard_work_bytes(
    layouts: Sequence[ShardLayout], weights: WeightGather, reduction: ShardSum, policy: Policy
) -> int:
    """Return the most bytes of a step, without state, beyond the most that torch's own communication takes.

    In backward a module has its weights, then gradients as large, while the next weights are gathered. The root has its
    weights until its own turn, and torch keeps the gradients that were reduced last. Here gradients of `MODULES_IN_FLIGHT`
    modules are on their way, too. Then the module's weights go, its gradients leave, and one module's are encoded or
    decoded. Gradients that travel as they are keep their memory.
    """
    ranks, sent = layouts[0].whole.ranks, reduction.codec is None and reduction.per_host == 1
    backward = [*layouts[-2::-1], layouts[-1]]
    wholes = [policy.param_dtype.itemsize * each.numel for each in backward]
    sizes = [policy.reduce_dtype.itemsize * each.numel for each in backward]
    of_sums = replace(ranks, per_host=reduction.per_host)
    reduced = functools.cache(lambda each: memory_of(reduce_program(each, reduction, policy.reduce_dtype), of_sums))
    gathered = functools.cache(lambda each: _gather_memory(each, weights, policy.param_dtype))
    sums, gathers = ([memory(each) for each in backward] for memory in (reduced, gathered))
    torchs, ours = 0, max(whole + each.most for whole, each in zip(wholes, gathers, strict=True))  # in forward
    for place, size in enumerate(sizes):
        after, first = place + 1, max(0, place - MODULES_IN_FLIGHT)
        both = sum(wholes[after:-1][:1]) + sum(wholes[after:][-1:])  # the next weights, and the root's
        kept = sum(sizes[first:place][-1:])
        torchs = max(torchs, both + wholes[place] + size + kept)
        waiting = sum(each.waiting for each in sums[first:place]) + sent * sum(sizes[first:place])
        waiting += 0 if weights.differences else sum(each.waiting for each in gathers[after:-1][:1])
        computed = max(each.most - each.waiting for each in sums[first:after])
        leaving = size + policy.reduce_dtype.itemsize * backward[place].row + sums[place].waiting + computed
        ours = max(ours, both + waiting + max(wholes[place] + size + kept * (not sent), leaving))
    return max(0, ours - torchs)


def _gather_memory(layout: ShardLayout, weights: WeightGather, dtype: torch.dtype) -> WorkMemory:
    """Return the memory of a module's gather beside that of torch's, which has the output, too."""
    program = gather_program(layout, weights, dtype)
    ranks = replace(layout.whole.ranks, per_host=weights.per_host)
    return WorkMemory() if program is None else memory_of(program, ranks)
