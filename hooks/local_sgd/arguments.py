"""The arguments of LocalSteps: checks, and what is made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...compress import Compressor, Spec, compressor
from ...compress.protocol.compressor import traits_of
from ...compress.state.shares import ranks_given
from ...ddp_core.transport.protocol import Decorator, time_limit
from ...ddp_core.transport.torch_groups import group_limit
from .fixed_sites import FixedSites
from .fragment import fragments
from .inside import Inside, Sites, named_parameters
from .outer import outer
from .outliers import checked
from .rounds import Rounds

of_models: WeakValueDictionary[int, Any] = WeakValueDictionary()  # LocalSteps, by the identity of their model


def check(model: object, optimizer: object, at: object) -> None:
    """Raise TypeError for what these cannot be, RuntimeError for a model whose local SGD has not ended."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a torch.nn.Module, got {model!r}")
    before = of_models.get(id(model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model))
    if before is not None and not before.closed:
        raise RuntimeError(
            "the model has LocalSteps already, and both would average it: call finish() or close() of the first ones, or "
            "create LocalSteps once, with a list of all optimizers"
        )
    if not listed(optimizer) or not all(hasattr(each, "register_step_post_hook") for each in listed(optimizer)):
        raise TypeError(
            f"optimizer is a torch.optim.Optimizer, whose steps are counted, or a list of several; got {optimizer!r}"
        )
    if at is not None and not hasattr(at, "meet"):
        raise TypeError(f"at is a gradwire.Rendezvous, such as Rendezvous('10.0.0.1:29400', sites=4); got {at!r}")


def listed(optimizer: Any) -> Sequence[Any]:
    """Return one or several optimizers as a sequence."""
    return optimizer if isinstance(optimizer, list | tuple) else [optimizer]


def inner(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that calls hooks: Accelerate's wrapper has none of its own, and may leave a step out."""
    inside = getattr(optimizer, "optimizer", None)
    if not isinstance(inside, Optimizer) or hasattr(optimizer, "_optimizer_step_post_hooks"):
        return optimizer
    return inner(inside)


def ranks_of(group: dist.ProcessGroup | None, timeout: timedelta | None) -> FixedSites:
    """Return the ranks of a process group as sites. Raises RuntimeError where there is none."""
    if group is None and not dist.is_initialized():
        raise RuntimeError(
            "LocalSteps averages over the ranks of a process group, or over sites that meet: call "
            "torch.distributed.init_process_group() first, or give at=gradwire.Rendezvous(...)"
        )
    chosen = group if group is not None else dist.group.WORLD
    assert chosen is not None
    return FixedSites(chosen, group_limit(chosen) if timeout is None else time_limit(timeout))


def seconds(given: float | None) -> float | None:
    """Return the seconds between two averages. Raises ValueError for what these cannot be."""
    if given is not None and not (isinstance(given, int | float) and 0 < given < math.inf):
        raise ValueError(f"every_seconds is a finite number of seconds above 0, or None to count steps; got {given!r}")
    return given


def site_compressor(spec: Spec) -> Compressor:
    """Return the compressor of a site's changes. Raises ValueError for one that sites cannot use."""
    built = compressor(spec)
    if traits_of(built).choices > 1:
        raise ValueError(
            f"a site that joins would not know the compressor that the others have chosen; got {spec!r}: give "
            f"LocalSteps one of its compressors, such as int4"
        )
    if ranks_given(built) is not None:
        raise ValueError(f"LocalSteps averages over whole sites: use a compressor without hosts+; got {spec!r}")
    return built


def rounds_of(
    module: nn.Module,
    inside: Inside,
    buffers: Tensor,
    count: int,
    specification: str,
    spec: Spec,
    sites: Sites,
    decorate: Decorator | None,
    outliers: str,
) -> Rounds:
    """Return the rounds of a model, with its buffers of real numbers. A collective call of the ranks of a site."""
    built = site_compressor(spec)
    named = named_parameters(module)
    trained = {name: each for name, each in named.items() if each.requires_grad}
    frozen = {
        name: each
        for name, each in named.items()
        if name not in trained and (each.is_floating_point() or each.is_complex())
    }
    parts = fragments(trained, count, frozen, inside.part)
    for rank, sizes in enumerate(inside.tell([part.layout.numel for part in parts])):
        if 0 in sizes:
            raise ValueError(
                f"rank {rank} of the site has nothing of fragment {sizes.index(0)}: give fewer fragments, or fewer ranks to "
                "a site"
            )
    return Rounds(
        sites, parts, buffers, outer(specification), built, decorate, checked(outliers), divided=inside.size > 1
    )
