"""The traffic of an FSDP2 model with gradwire, before anything is trained."""

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
from ...compress.shards.weights import HeldWeights, OwnRows, WeightGather, weight_gather
from ...compress.simulate import alike, traffic
from ...compress.state.shares import placed_on_hosts
from ..plan import Plan

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
        The traffic of one rank, and the memory of residuals and of weights in use. `compression_ratio` is against "none"
        for both.

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
    elements = sum(each.numel() for part in parts for each in part.values())
    state = sum(_state_bytes(layout, weights, reduction) for layout in layouts)
    return Plan(
        f"{gather}/{reduce}",
        elements,
        world_size,
        now.payload_bytes,
        now.sent_bytes,
        sent[1] / sent[0] if sent[0] else 1.0,
        state,
    )


def _layout_of(part: Mapping[str, Tensor], ranks: Ranks) -> ShardLayout:
    shapes = tuple(tuple(each.shape) for each in part.values())
    return ShardLayout(Layout(tuple(part), shapes, torch.float32, META, ranks), (0,) * len(part))


def _step(layout: ShardLayout, gathers: int, weights: WeightGather, reduction: ShardSum) -> Traffic:
    """The traffic of a module: so many gathers, one where differences travel, and a reduction."""
    row = torch.empty(layout.row, device=META)
    ranks = layout.whole.ranks
    if weights.codec is None and weights.per_host == 1:
        one = traffic(AllGather(row), ranks)
    else:
        held = (
            HeldWeights(OwnRows.empty(layout), row.expand(ranks.world_size, -1).clone())
            if weights.differences
            else None
        )
        out = torch.empty(layout.numel, device=META)
        one = _driven(weights.gather(row, out, held), replace(ranks, per_host=weights.per_host))
    grad = torch.empty(layout.numel, device=META)
    reduced = _driven(
        reduction.reduce(grad, reduction.init(layout), torch.empty_like(row)),
        replace(ranks, per_host=reduction.per_host),
    )
    return sum([one] * (1 if weights.differences else gathers), reduced)


def _driven(program: Program[Any], ranks: Ranks) -> Traffic:
    """The traffic of a program where all ranks do as this one."""
    total, (request, _) = Traffic(), next_request(program, None)
    while request is not None:
        total += traffic(request, ranks)
        request, _ = next_request(program, alike(request, ranks))
    return total


def _state_bytes(layout: ShardLayout, weights: WeightGather, reduction: ShardSum) -> int:
    residual = reduction.init(layout).residual
    held = (
        4 * (layout.numel + 2 * layout.row) if weights.differences else 0
    )  # of all ranks; its own ones for checkpoints
    return held + (0 if residual is None else residual.flat.nbytes)
