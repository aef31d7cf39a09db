"""Models that train on FSDP2, in place of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...compress import Optimizers
from ...compress.builder.optimizer_defaults import tuned_specification
from ...compress.shards.reduction import shard_sum
from ...compress.shards.weights import weight_gather
from ...compress.simulate import Traffic

TORCH = "torch"  # in place of a compressor: FSDP2 with its own communication
SHARE = 50  # modules of a list with at least so small a part of all parameters are sharded by themselves


def check_payloads(spec: str) -> None:
    """Raise ValueError unless a text names compressors of weights and gradients."""
    if spec != TORCH:
        gather, reduce = payloads(spec)
        weight_gather(gather)
        shard_sum(reduce)


def payloads(spec: str) -> tuple[str, str]:
    """Return the compressor of the weights, and that of the gradients.

    >>> payloads("int8/int4"), payloads("int8")
    (('int8', 'int4'), ('int8', 'int8'))
    """
    gather, slash, reduce = spec.partition("/")
    return gather, reduce if slash else gather


def tuned_payloads(spec: str, optimizers: Optimizers) -> str:
    """Return both compressors, that of the gradients with the options that `attach` adds for the optimizers."""
    gather, reduce = payloads(spec)
    hosts, plus, inner = reduce.rpartition("+")
    filled = tuned_specification(inner, optimizers)
    return spec if filled == inner else f"{gather}/{hosts}{plus}{filled}"


def shard(model: nn.Module, device: torch.device) -> None:
    """Have FSDP2 shard a model in place, a module a block and one for the rest."""
    from torch.distributed.device_mesh import init_device_mesh  # here, since they take seconds
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    modules: list[Any] = [*blocks(model), model]
    for module in modules:
        fully_shard(module, mesh=mesh)
    for module, following in pairwise(reversed(modules)):
        module.set_modules_to_forward_prefetch([following])  # its weights are gathered while this one computes


def blocks(model: nn.Module) -> list[nn.Module]:
    """The large modules of lists of modules, inner ones first."""
    total = _elements(model)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    found = {child: None for each in lists for child in each if SHARE * _elements(child) >= total}
    return [module for module in reversed(list(model.modules())) if module in found and module is not model]


def parts(model: nn.Module) -> list[dict[str, Tensor]]:
    """The parameters of each module that `shard` shards by itself, by name; the outermost one comes last."""
    taken: dict[Tensor, None] = {}
    names = {parameter: name for name, parameter in model.named_parameters()}
    found: list[dict[str, Tensor]] = []
    for module in (*blocks(model), model):
        mine = [each for each in module.parameters() if each not in taken]
        taken |= dict.fromkeys(mine)
        found.append({names[each]: each for each in mine})
    return found


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def without_sync(model: Any) -> Iterator[None]:
    """A backward inside leaves gradients where they are, as that of DDP's `no_sync`."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def copy_whole(model: nn.Module, bare: nn.Module) -> None:
    """The exact parameters of a sharded model, and its buffers, into one that is not sharded. A collective call."""
    with torch.no_grad():
        for own, theirs in zip(bare.parameters(), model.parameters(), strict=True):
            own.copy_(theirs.full_tensor())  # type: ignore[attr-defined]
        for mine, buffer in zip(bare.buffers(), model.buffers(), strict=True):
            mine.copy_(buffer)


def torchs_traffic(model: nn.Module, world_size: int, batches: int) -> Traffic:
    """Compute what torch's own communication sends in an optimizer step of `batches` batches, by its rules.

    In each batch weights of all modules are gathered in forward, and but for the outermost again in backward. Gradients are
    summed by a reduce-scatter, which is an all-reduce in Gloo.
    """
    inside = blocks(model)
    whole = 4 * _elements(model)
    inner = 4 * sum(each.numel() for each in {each for module in inside for each in module.parameters()})
    rest = whole > inner
    gathered, others = batches * (whole + inner), (world_size - 1) / world_size
    reduced = (2 if dist.get_backend() == "gloo" else 1) * whole
    rounds = batches * (2 * len(inside) + rest) + len(inside) + rest
    return Traffic(rounds, gathered // world_size + whole, others * (gathered + reduced))
