"""The traffic and memory of an FSDP2 model with gradwire, before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...compress import AllGather, Layout, Program, Ranks, Spec, Traffic
from ...compress.protocol.requests import next_request
from ...compress.shards.layout import ShardLayout
from ...compress.shards.reduction import ShardSum, shard_sum
from ...compress.shards.weights import HeldWeights, OwnRows, WeightGather, WeightKind, weight_gather
from ...compress.simulate import WorkMemory, alike, memory_of, traffic
from ...compress.state.shares import placed_on_hosts
from ..plan import Plan
from .arrivals import IN_FLIGHT

META = torch.device("meta")


def plan_sharded(parts: Sequence[Mapping[str, Tensor]], gather: Spec, reduce: Spec, *, world_size: int) -> Plan:
    """Compute the traffic of a step by a dry run: forward, backward with one synchronization, no mixed precision.

    Args:
        parts: the parameters of each module that `fully_shard` is applied to; the root, which keeps its weights until
            backward, is the last one.
        gather: the compressor of weights.
        reduce: the compressor of gradients.
        world_size: the number of ranks.

    Returns:
        The traffic and memory of one rank. `compression_ratio` is against "none" for both, `work_bytes` is beyond the
        memory of torch's own communication.

    Raises:
        ValueError: a compressor is refused.
    """
    ranks, weights, reduction = Ranks(world_size), weight_gather(gather), shard_sum(reduce)
    hosts = [ranks if each.hosts is None else placed_on_hosts(each.hosts, ranks) for each in (weights, reduction)]
    weights, reduction = weights.placed(hosts[0].per_host, world_size), reduction.placed(hosts[1].per_host, world_size)
    layouts = [_layout_of(part, ranks) for part in parts if part]
    gathers = [2] * (len(layouts) - 1) + [1]
    now, before = (
        sum((_step(*each, *ways) for each in zip(layouts, gathers, strict=True)), Traffic())
        for ways in ((weights, reduction), (WeightGather(), ShardSum()))
    )
    sent = (now.sent_bytes, before.sent_bytes) if world_size > 1 else (now.payload_bytes, before.payload_bytes)
    return Plan(
        f"{gather}/{reduce}",
        sum(each.numel() for part in parts for each in part.values()),
        world_size,
        now.payload_bytes,
        now.sent_bytes,
        sent[1] / sent[0] if sent[0] else 1.0,
        sum(_state_bytes(layout, weights, reduction) for layout in layouts),
        _work_bytes(layouts, weights, reduction),
    )


def _layout_of(part: Mapping[str, Tensor], ranks: Ranks) -> ShardLayout:
    shapes = tuple(tuple(each.shape) for each in part.values())
    return ShardLayout(Layout(tuple(part), shapes, torch.float32, META, ranks), (0,) * len(part))


def _step(layout: ShardLayout, gathers: int, weights: WeightGather, reduction: ShardSum) -> Traffic:
    """The traffic of a module: so many gathers, one where differences travel, and a reduction."""
    ranks, program = layout.whole.ranks, _gather(layout, weights)
    if program is None:
        one = traffic(AllGather(torch.empty(layout.row, device=META)), ranks)
    else:
        one = _driven(program, replace(ranks, per_host=weights.per_host))
    reduced = _driven(_reduce(layout, reduction), replace(ranks, per_host=reduction.per_host))
    return sum([one] * (1 if weights.differences else gathers), reduced)


def _gather(layout: ShardLayout, weights: WeightGather) -> Program[Tensor] | None:
    """Return the program of a module's gather; None where torch gathers it."""
    if weights.codec is None and weights.per_host == 1:
        return None
    row = torch.empty(layout.row, device=META)
    rows = row.expand(layout.whole.ranks.world_size, -1).clone() if weights.differences else None
    held = None if rows is None else HeldWeights(_own_rows(layout), rows)
    return weights.gather(row, torch.empty(layout.numel, device=META), WeightKind(torch.float32, layout), held)


def _own_rows(layout: ShardLayout) -> OwnRows:
    """Return rows as they are after a step, with room for those of the next one."""
    own = OwnRows.empty(layout)
    own.update()
    own.keep()
    return own


def _reduce(layout: ShardLayout, reduction: ShardSum) -> Program[Tensor]:
    grad, out = torch.empty(layout.numel, device=META), torch.empty(layout.row, device=META)
    return reduction.reduce(grad, reduction.init(layout), out)


def _driven(program: Program[Any], ranks: Ranks) -> Traffic:
    """The traffic of a program where all ranks do as this one."""
    total, (request, _) = Traffic(), next_request(program, None)
    while request is not None:
        total += traffic(request, ranks)
        request, _ = next_request(program, alike(request, ranks))
    return total


def _state_bytes(layout: ShardLayout, weights: WeightGather, reduction: ShardSum) -> int:
    residual = reduction.init(layout).residual
    own = 2 * _own_rows(layout).flat.nbytes  # for checkpoints, before and after a step
    held = 4 * layout.numel + own if weights.differences else 0
    return held + (0 if residual is None else residual.flat.nbytes)


def _work_bytes(layouts: Sequence[ShardLayout], weights: WeightGather, reduction: ShardSum) -> int:
    """Return the most bytes of a step, without state, beyond the most that torch's own communication takes.

    In backward a module has its weights, then gradients as large, while the next weights are gathered. The root has its
    weights until its own turn, and torch keeps the gradients that were reduced last. Here gradients of `IN_FLIGHT` modules
    are on their way, too. Then the module's weights go, its gradients leave, and one module's are encoded or decoded.
    Gradients that travel as they are keep their memory.
    """
    ranks, sent = layouts[0].whole.ranks, reduction.codec is None and reduction.per_host == 1
    backward = [*layouts[-2::-1], layouts[-1]]
    sizes = [4 * each.numel for each in backward]
    sums = [memory_of(_reduce(each, reduction), replace(ranks, per_host=reduction.per_host)) for each in backward]
    gathers = [_gather_memory(each, weights) for each in backward]
    torchs, ours = 0, max(size + each.most for size, each in zip(sizes, gathers, strict=True))  # in forward
    for place, size in enumerate(sizes):
        after, first = place + 1, max(0, place - IN_FLIGHT)
        both = sum(sizes[after:-1][:1]) + sum(sizes[after:][-1:])  # the next weights, and the root's
        kept = sum(sizes[first:place][-1:])
        torchs = max(torchs, both + 2 * size + kept)
        waiting = sum(each.waiting for each in sums[first:place]) + sent * sum(sizes[first:place])
        waiting += 0 if weights.differences else sum(each.waiting for each in gathers[after:-1][:1])
        computed = max(each.most - each.waiting for each in sums[first:after])
        leaving = size + 4 * backward[place].row + sums[place].waiting + computed
        ours = max(ours, both + waiting + max(2 * size + kept * (not sent), leaving))
    return max(0, ours - torchs)


def _gather_memory(layout: ShardLayout, weights: WeightGather) -> WorkMemory:
    """Return the memory of a module's gather beside that of torch's, which has the output, too."""
    program = _gather(layout, weights)
    ranks = replace(layout.whole.ranks, per_host=weights.per_host)
    return WorkMemory() if program is None else memory_of(program, ranks)
