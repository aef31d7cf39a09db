"""The arguments of LocalSteps: checks, and what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ...ddp_core.transport.protocol import time_limit
from .sites import FixedSites


def check(model: object, optimizer: object, at: object) -> None:
    """Raise TypeError for what these cannot be."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a torch.nn.Module, got {model!r}")
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


def ranks_of(group: dist.ProcessGroup | None, timeout: timedelta) -> FixedSites:
    """Return the ranks of a process group as sites. Raises RuntimeError where there is none."""
    if group is None and not dist.is_initialized():
        raise RuntimeError(
            "LocalSteps averages over the ranks of a process group, or over sites that meet: call "
            "torch.distributed.init_process_group() first, or give at=gradwire.Rendezvous(...)"
        )
    chosen = group if group is not None else dist.group.WORLD
    assert chosen is not None
    return FixedSites(chosen, time_limit(timeout))
