"""What a training step of a trace takes, by replay: no process runs."""

from __future__ import annotations

import math

from ....ddp_core.overlap.bounds import synchronous
from ....ddp_core.overlap.link_cost import LinkCost
from ....ddp_core.overlap.replay import priority_order, replay
from ....ddp_core.overlap.slice_order import WORTH
from ..order import BACKWARD, Order
from .step_model import step_by_buckets, step_by_slices
from .trace import Trace


def predicted(
    trace: Trace,
    spec: str,
    world_size: int,
    cost: LinkCost,
    order: Order,
    *,
    dilate: float = 1.0,
    bucket_mb: float | None = None,
) -> float:
    """Seconds of a step once warm-ups are over, without the arithmetic of compressor and optimizer.

    `bucket_mb`: of buckets, MiB; None is DDP's default. In an order other than backward's, of slices on the wire.
    """
    if order == BACKWARD:
        return synchronous(step_by_buckets(trace, spec, world_size, cost, dilate, bucket_mb))
    model = step_by_slices(trace, spec, world_size, cost, dilate, bucket_mb)
    waiting, planned = synchronous(model), replay(model, priority_order(model)).step
    if order == "slices" or (order == "auto" and planned > WORTH * waiting):
        return waiting
    return planned


def cost_on(hosts: int, rate: float, latency: float) -> LinkCost:
    """Of collectives over so many hosts with links of `rate` bytes a second (0: no limit) and `latency` seconds from one to
    another: 2 log2(hosts) of them a collective, as in trees and in recursive halving.
    """
    hops = 2 * math.ceil(math.log2(hosts)) if hosts > 1 else 0
    return LinkCost(hops * latency, 1 / rate if rate else 0.0)
