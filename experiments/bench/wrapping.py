"""A model as a setting trains it: whose DistributedDataParallel, which compressor, when buckets go."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ...compress import Ranks
from ...ddp_core import Decorator, DistributedDataParallel, Handle
from ...hooks.plan import ratio
from ...hooks.slices import wire_mb
from ...hooks.torch_ddp import attach
from ..workloads.order import BACKWARD
from .no_overlap import communicate_after_backward
from .rows import Case, Traffic

FLOAT_BYTES = 4


def wrapped(
    model: nn.Module, case: Case, groups: Sequence[dist.ProcessGroup], timeout: timedelta, transport: Decorator | None
) -> tuple[nn.Module, Handle | None]:
    """The model to train and, where gradwire moves the bytes, its handle.

    `transport`: what to put around transports. Then gradwire moves the bytes in any case: an emulated link holds back only
    what gradwire sends.
    """
    if case.ddp == "none":
        return model, None
    device = next(model.parameters()).device
    chosen = list(groups[: case.process_groups])
    arguments: dict[str, Any] = {
        "device_ids": None if device.type == "cpu" else [device.index],
        "bucket_cap_mb": case.bucket_mb,
        "gradient_as_bucket_view": True,
        "init_sync": False,  # all ranks have made the same model
        **no_buffer_sync(),
    }
    if case.ddp == "gradwire" and case.overlap:
        ours = DistributedDataParallel(
            model, process_group=chosen, compressor=case.compressor, timeout=timeout, transport=transport, **arguments
        )
        return ours, ours.compression
    plain: TorchDDP = (
        DistributedDataParallel(model, process_group=chosen, timeout=timeout, transport=transport, **arguments)
        if case.ddp == "gradwire"
        else TorchDDP(model, process_group=chosen[0], **arguments)
    )
    if not case.overlap:
        return plain, communicate_after_backward(plain, case.compressor, chosen, timeout, transport)
    as_torch_does = case.compressor == "none" and transport is None
    return plain, None if as_torch_does else attach(plain, case.compressor, timeout=timeout, transport=transport)


def no_buffer_sync() -> dict[str, bool]:
    """The argument that leaves the buffers of batch normalisation alone in forward, by the name that this torch has."""
    known = inspect.signature(TorchDDP.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def traffic(model: nn.Module, case: Case, handle: Handle | None, world_size: int) -> Traffic:
    """What a rank sends in a synchronized iteration: measured where gradwire sends it, else what torch's all-reduces do."""
    elements = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if case.ddp == "none":
        return Traffic()
    if handle is None:
        payload = FLOAT_BYTES * elements
        return Traffic(payload, 2 * (world_size - 1) / world_size * payload)
    last = handle.stats().last.traffic
    return Traffic(last.payload_bytes, last.sent_bytes, ratio(elements, last, world_size))


def slice_mb(model: nn.Module, case: Case, world_size: int) -> float | None:
    """MiB on the wire of what a setting sends at once; None where that is buckets."""
    if case.order == BACKWARD:
        return None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return wire_mb(case.compressor, Ranks(world_size), trained, case.bucket_mb)
