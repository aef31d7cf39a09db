"""gradwire on torch's DistributedDataParallel."""

# torch compares the annotations of a hook themselves, so this file must not postpone them.

from collections.abc import Callable
from datetime import timedelta
from functools import partial as partially
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..compress import Spec
from ..ddp_core import DEFAULT_TIMEOUT, Decorator, Handle

HookFunction: TypeAlias = Callable[[Handle, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def compress_bucket(state: Handle, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook itself, for `DistributedDataParallel.register_comm_hook(handle, compress_bucket)`."""
    return state.reduce(bucket)


def attach(
    model: DistributedDataParallel,
    spec: Spec,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    transport: Decorator | None = None,
) -> Handle:
    """Compress the gradients of a DDP model: `handle = attach(ddp_model, "powersgd:rank=4,start_iter=1000")`.

    `process_group`: where to reduce, by default the model's own. `timeout`: of waits for averages on the CPU. `transport`:
    what to put around each transport, such as an emulated link. All ranks call it before the first backward. Raises
    TypeError for a model that is not DDP and ValueError for a wrong specification.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"attach needs a model wrapped in torch.nn.parallel.DistributedDataParallel, got {type(model).__name__}: "
            f"wrap it first, then attach"
        )
    state, hook = comm_hook(spec, model, process_group=process_group, timeout=timeout, transport=transport)
    model.register_comm_hook(state, hook)
    return state


def comm_hook(
    spec: Spec,
    model: nn.Module | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    partial: bool | None = None,
    transport: Decorator | None = None,
) -> tuple[Handle, HookFunction]:
    """State and hook for whoever registers them: `ddp_model.register_comm_hook(*comm_hook("bf16", ddp_model))`.

    `model`, DDP or bare, gives parameters their names. Without it they are numbered in the order in which DDP first hands
    them over (the model's order where DDP starts with one bucket, as it does without find_unused_parameters), until
    `handle.bind(model)` is called. `partial`: whether backwards may leave parameters out; DDP's find_unused_parameters where
    `model` is DDP.
    """
    ddp = model if isinstance(model, DistributedDataParallel) else None
    if process_group is None and ddp is not None:
        process_group = ddp.process_group
    if partial is None:
        partial = ddp is not None and ddp.find_unused_parameters and not ddp.static_graph
    handle = Handle(spec, process_group, timeout, partial=partial, transport=transport)
    if model is not None:
        handle.bind(model)
    if ddp is not None and (ddp.static_graph or getattr(ddp, "skip_all_reduce_unused_params", False)):
        ddp.register_forward_pre_hook(partially(_forward_begins, handle))  # indices of buckets do not tell
    return handle, compress_bucket


def _forward_begins(handle: Handle, *_: Any) -> None:
    handle.expect_step()
