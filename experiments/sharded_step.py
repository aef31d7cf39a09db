"""The step of an FSDP2 model on GPUs that nobody has measured, predicted for `gradwire plan`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from ..compress.protocol.requests import ReduceScatter, Request
from ..compress.shards.layout import ShardLayout
from .advice.network import kind_of
from .advice.predict import Prediction
from .ddp_step import BACKWARD, Cluster, cost_of
from .sharded_plan import Policy, Shards
from .workloads.sharding import TORCH, payloads

# Of DDP's arithmetic: by a gather, which decodes all, and by a reduction, which encodes all, too.
ENCODED = (1 / 3, 2 / 3)


@dataclass(frozen=True)
class Module:
    """Seconds of a module and a micro-batch: of the network for its gathers and its reduction, and of the GPU.

    `decode`: of the latter, the part of forward and of backward that decodes weights. `encode`: before the reduction.
    """

    gather: float
    again: float
    reduce: float
    forward: float
    backward: float
    decode: float
    encode: float


def predicted_shards(
    parts: Sequence[Mapping[str, Tensor]],
    cluster: Cluster,
    spec: str,
    computation: float,
    policy: Policy = Policy(),  # noqa: B008
    micro_batches: int = 1,
) -> Prediction:
    """Predict a step. Latency is left out, computation takes time by elements, and the last micro-batch sends gradients.

    Args:
        parts: the modules, as `plan_sharded` takes them.
        cluster: the hosts.
        spec: the compressors of weights and gradients, or "torch" for FSDP2 by itself, on NCCL.
        computation: seconds of a step's computation.
        policy: the dtypes that are sent.
        micro_batches: those that a step accumulates.
    """
    pair = ("none", "none") if spec == TORCH else payloads(spec)
    shards = Shards.of(parts, *pair, cluster.ranks, policy)
    encode = [part * cost_of(each, cluster).encode for part, each in zip(ENCODED, pair, strict=True)]
    part = computation / micro_batches
    network = functools.cache(partial(_network, shards, cluster, spec))
    modules = [_module(shards, place, network, part, encode) for place in _in_forward(shards)]
    sending = sum(micro_batches * (each.gather + each.again) + each.reduce for each in modules)
    encoding = sum(micro_batches * each.decode + each.encode for each in modules)
    return Prediction(
        _seconds(modules, micro_batches),
        max(sending, computation + encoding),
        shards.traffic(micro_batches).sent_bytes,
        computation=computation,
        encode=encoding,
        network=sending,
    )


def _in_forward(shards: Shards) -> list[int]:
    """Return the places of the modules in forward: the root, then the others."""
    last = len(shards.layouts) - 1
    return [last, *range(last - 1, -1, -1)]


def _network(shards: Shards, cluster: Cluster, spec: str, layout: ShardLayout) -> tuple[float, float]:
    """Return the seconds of a module's gather and of its reduction."""
    reduction: Iterable[Request] = shards.reduce(layout)
    if spec == TORCH:
        reduction = [ReduceScatter(torch.empty(layout.numel, dtype=shards.policy.reduce_dtype, device="meta"))]
    return network_seconds(shards.gather(layout), cluster), network_seconds(reduction, cluster)


def _module(
    shards: Shards,
    place: int,
    network: Callable[[ShardLayout], tuple[float, float]],
    computation: float,
    encode: Sequence[float],
) -> Module:
    layout = shards.layouts[place]
    root = place == len(shards.layouts) - 1
    elements, everything = layout.whole.numel, sum(each.whole.numel for each in shards.layouts)
    gather, reduce = network(layout)
    once = root or shards.weights.differences
    part = computation * elements / everything
    decode, both = (each * elements for each in encode)
    return Module(
        gather,
        0.0 if once else gather,
        reduce,
        (1 - BACKWARD) * part + decode,
        BACKWARD * part + (0.0 if once else decode),
        (1 if once else 2) * decode,
        both,
    )


def network_seconds(requests: Iterable[Request], cluster: Cluster) -> float:
    """Return the time of requests one after the other, without latency."""
    return sum(
        cluster.seconds_a_byte(kind_of(each)) * each.sent_bytes(len(cluster.ranks.members(each.scope)))
        for each in requests
    )


def _seconds(modules: Sequence[Module], micro_batches: int) -> float:
    """Return the seconds of a step. `modules`: in the order of forward; backward goes the other way.

    While a module computes, the weights of the next one travel, as FSDP2 prefetches them, behind gradients sent before.
    """
    forward = [(each.gather, each.forward, 0.0) for each in modules]
    backward = [(each.again, each.backward, 0.0) for each in reversed(modules)]
    last = [(each.again, each.backward + each.encode, each.reduce) for each in reversed(modules)]
    turns = [*(forward + backward) * (micro_batches - 1), *forward, *last, (0.0, 0.0, 0.0)]
    now = link = arrived = turns[0][0]
    for (_, computes, sends), (gather, _, _) in pairwise(turns):
        now = max(now, arrived)
        if gather:
            link = max(link, now) + gather
        arrived = link if gather else now
        now += computes
        if sends:
            link = max(link, now) + sends
    return max(now, link)
