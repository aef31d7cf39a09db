"""gradwire on FSDP2 models: two averagers at most, among the ranks that share parameters and among their replicas.

Who communicates:

| mesh | `attach` is given | among shards | among replicas |
| --- | --- | --- | --- |
| one axis | `gather`, `reduce` or neither | gradwire | |
| two axes | `gather`, `reduce` or neither | gradwire | torch |
| two axes | `replicas` | torch | gradwire |
| two axes | `replicas` and `gather` or `reduce` | gradwire | gradwire |
| two axes, one shard (`alone`) | `replicas` | | gradwire |
| two axes, one shard (`alone`) | `gather`, `reduce` or neither | | torch |
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...compress.builder.optimizer_defaults import innermost, optimizers_of
from ...compress.shards.reduction import shard_sum
from ...compress.shards.weights import weight_gather
from ...ddp_core import Decorator
from ...ddp_core.averaging.shard_averager import ShardAverager
from .arrivals import Arrivals
from .communication import GradMode, ShardGather, ShardReduction
from .finite_everywhere import FiniteEverywhere
from .handle import ShardHandle
from .modules import ShardedModule, modules_of
from .replicas import handle_of_replicas, take_replicas
from .sharding import Sharding

logger = logging.getLogger(__name__)
WHAT = {"gather": "weights", "reduce": "gradients", "replicas": "gradients between replicas"}
LEFT_OUT = "%s of the FSDP2 model travel uncompressed: pass %s to gradwire.attach, or %s if that is meant"
ONE_HOST = (
    "gradients of the FSDP2 model travel uncompressed: reduce=%r compresses between hosts alone, and all ranks that share "
    "parameters are on one host here. Pass reduce=%r to gradwire.attach, or 'none' if that is meant"
)
ONE_REPLICA = (
    "the FSDP2 model has one replica, so nothing travels between replicas: replicas=%r compresses nothing. Start one "
    "torchrun on each host: the first dimension of the mesh is their number"
)
MUON = (
    "torch's Muon computes with whole matrices, so its step() sends %d sharded matrices between the ranks%s, several times "
    "and uncompressed. gradwire neither compresses nor counts these bytes, which may be more than all others. If the model "
    "fits on one rank, use DDP or replicate(), where Muon sends nothing"
)


def attach_sharded(
    model: nn.Module, asked: Sharding, timeout: timedelta | None, transport: Decorator | None
) -> ShardHandle:
    """Communicate for an FSDP2 model.

    Raises ValueError for a specification or a model that is refused, and RuntimeError for a torch that is too old.
    """
    weights, reduction = weight_gather(asked.gather or "none"), shard_sum(asked.reduce or "none", asked.optimizer)
    modules = modules_of(model)
    replicas = handle_of_replicas(modules, asked, timeout, transport)
    alone = modules[0].alone
    of_shards = asked.of_shards and not (alone and replicas is not None)
    among_replicas = None if replicas is None else replicas.averager
    among_shards = ShardAverager(
        reduction,
        weights,
        modules[0].shard_group,
        modules[0].device,
        timeout,
        transport,
        steps=None if among_replicas is None else among_replicas.steps,
        undo=asked.undo,
        replica_group=None if alone else modules[0].replica_group,
    )
    agreement = FiniteEverywhere(
        among_replicas,
        among_shards if of_shards else None,
        sharing=None if alone else among_shards.engines,
    )
    limit = among_shards.engines.timeout
    arrivals = Arrivals(among_shards.steps, model, among_shards.device, limit, agreement, modules)
    if replicas is not None:
        take_replicas(modules, replicas, arrivals)
    if of_shards and not alone:
        _take_shards(modules, among_shards, arrivals, replicated=replicas is not None)
    trained = ((each, name) for name, each in model.named_parameters() if each.requires_grad)
    names: dict[Tensor, str] = {
        each: name for each, name in trained if isinstance(each, DTensor)
    }  # not what is gathered now
    here = [each for each in names if isinstance(each, DTensor) and each.to_local().numel()]
    handle = ShardHandle(among_shards, replicas, modules, here, of_shards=of_shards)
    handle.suit(asked.optimizer, names, asked.reduce or "none", asked.replicas or "none")
    if replicas is not None:
        replicas.optimizer = asked.optimizer
    if among_shards.engines.first:
        several = modules[0].replica_group is not None and modules[0].replica_group.size() > 1
        _warn(asked, () if alone else names, several_replicas=several)
        if not (several or alone) and asked.replicas not in (None, "none"):
            logger.warning(ONE_REPLICA, asked.replicas)
        on_one_host = reduction.codec is not None and among_shards.memory.reduction.codec is None
        if on_one_host and of_shards and not alone:
            logger.warning(ONE_HOST, str(reduction), str(reduction).partition("+")[2])
    return handle


def _warn(asked: Sharding, sharded: Collection[Tensor], *, several_replicas: bool) -> None:
    """Warn of what travels uncompressed, though nobody asked for it. `sharded`: the parameters that several ranks share."""
    travel = {
        "gather": asked.of_shards and sharded,
        "reduce": asked.of_shards and sharded,
        "replicas": several_replicas,
    }
    left_out = [name for name in WHAT if travel[name] and getattr(asked, name) is None]
    if left_out:
        options = ", ".join(f"{name}='int8'" for name in left_out)
        what = " and ".join(WHAT[name] for name in left_out)
        logger.warning(LEFT_OUT, what, options, ", ".join(f"{name}='none'" for name in left_out))
    several = [] if asked.optimizer is None else optimizers_of(asked.optimizer)
    groups = [group for each in several if isinstance(innermost(each), torch.optim.Muon) for group in each.param_groups]
    matrices = {parameter for group in groups for parameter in group["params"]}.intersection(sharded)
    if matrices:
        logger.warning(MUON, len(matrices), " (some also between replicas)" if several_replicas else "")


def _take_shards(
    modules: Sequence[ShardedModule], averager: ShardAverager, arrivals: Arrivals, *, replicated: bool
) -> None:
    """Have weights gathered, and gradients reduced, among the S ranks that share parameters. R ranks have the same shards.

    gradwire multiplies the mean over shards by `scale`, and torch divides by `divisor` after all sums:

    | user's divisor | averages over replicas | `scale` | `divisor` |
    | --- | --- | --- | --- |
    | none | torch | 1 | R |
    | none | gradwire | 1 | 1 |
    | d | torch | S / d | 1 |
    | d | gradwire | S R / d | 1 |
    """
    grad_mode = GradMode()
    for module in modules:
        others = 1 if module.replica_group is None else module.replica_group.size()
        means = others if replicated else 1  # of replicas: their compressor divides
        total = float(module.shard_group.size() * means)
        scale = 1.0 if module.divisor is None else total / module.divisor
        divisor = 1.0 if module.divisor is not None or replicated else float(others)
        reduction = ShardReduction(module, averager, arrivals, scale, total)
        module.take(ShardGather(module, averager, grad_mode), reduction, divisor)
