"""gradwire on FSDP2 models."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import nn

from ...compress import Spec
from ...compress.shards import shard_codec, shard_sum
from ...ddp_core import Decorator, ShardAverager
from .communication import Arrivals, ShardGather, ShardReduction
from .handle import ShardHandle
from .modules import ShardedModule, modules_of


def attach_sharded(
    model: nn.Module,
    spec: Spec | None,
    gather: Spec | None,
    reduce: Spec | None,
    process_group: dist.ProcessGroup | None,
    timeout: timedelta,
    transport: Decorator | None,
) -> ShardHandle:
    """Communicate for an FSDP2 model: weights by `gather`, gradients by `reduce`; as they are where it is not said how.

    Raises ValueError for a specification or a model that is refused, TypeError for arguments that are DDP's, RuntimeError
    for a torch that is too old.
    """
    if spec is not None or process_group is not None:
        raise TypeError(
            "an FSDP2 model has process groups of its own, and says what travels how: "
            "attach(fsdp_model, gather='int8', reduce='int4')"
        )
    codec, reduction = shard_codec(gather or "none"), shard_sum(reduce or "none")
    modules = modules_of(model)
    if taken := [module for module in modules if not module.takes_communication]:
        raise ValueError(
            f"somebody communicates for {len(taken)} of its {len(modules)} sharded modules already: attach once, or close() "
            "the handle first"
        )
    averager = ShardAverager(reduction, codec, modules[0].shard_group, modules[0].device, timeout, transport)
    arrivals = Arrivals(averager)
    for module in modules:
        keeps_torchs = codec is None and module.device.type != "cpu"
        mine = ShardReduction(module, averager, arrivals, _scale(module))
        module.take(None if keeps_torchs else ShardGather(module, averager), mine, _divisor(module))
    return ShardHandle(averager, modules)


def _scale(module: ShardedModule) -> float:
    """What means over shards are multiplied by, where the user has gradients divided by something else."""
    return 1.0 if module.divisor is None else module.shard_group.size() / module.divisor


def _divisor(module: ShardedModule) -> float:
    """What torch has to divide by: its sums of means over replicas."""
    replicas = module.replica_group
    return float(replicas.size()) if replicas is not None and module.divisor is None else 1.0
