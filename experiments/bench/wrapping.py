"""A model as a setting trains it: whose DistributedDataParallel, which compressor, when buckets go."""

# torch compares the annotations of a hook themselves, so this file must not postpone them.

import inspect
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import Optimizer

from ...compress import Ranks
from ...ddp_core import Decorator, DistributedDataParallel, Handle
from ...hooks.torch_ddp import attach, compress_bucket
from ..advice.slice_sizes import wire_mb
from ..bucket_plan import ratio
from ..workloads.order import BACKWARD
from .rows import Case, Traffic


def wrapped(
    model: nn.Module,
    optimizer: Optimizer,
    case: Case,
    groups: Sequence[dist.ProcessGroup],
    timeout: timedelta,
    transport: Decorator | None,
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
        arguments |= {"compressor": case.compressor, "optimizer": optimizer}
        ours = DistributedDataParallel(model, process_group=chosen, timeout=timeout, transport=transport, **arguments)
        return ours, ours.compression
    plain: TorchDDP = (
        DistributedDataParallel(model, process_group=chosen, timeout=timeout, transport=transport, **arguments)
        if case.ddp == "gradwire"
        else TorchDDP(model, process_group=chosen[0], **arguments)
    )
    if not case.overlap:
        handle = Handle(case.compressor, chosen, timeout, transport=transport)
        handle.bind(plain)
        plain.register_comm_hook(DelayedBuckets(handle), delay_bucket)
        return plain, handle
    options: dict[str, Any] = {"optimizer": optimizer, "timeout": timeout, "transport": transport}
    as_torch_does = case.compressor == "none" and transport is None
    return plain, None if as_torch_does else attach(plain, case.compressor, **options)


class DelayedBuckets:
    """The buckets of a backward that wait for the last one, with the futures that were promised for them."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.waiting: list[tuple[dist.GradBucket, torch.futures.Future[torch.Tensor]]] = []

    def start_all(self) -> None:
        """Start them all, in the order in which they got ready."""
        waiting, self.waiting = self.waiting, []
        for bucket, promised in waiting:
            compress_bucket(self.handle, bucket).add_done_callback(partial(_pass_on, promised))


def delay_bucket(state: DelayedBuckets, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that starts nothing before the last bucket is ready."""
    device = bucket.buffer().device
    promised: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[device] if device.type == "cuda" else []
    )
    state.waiting.append((bucket, promised))
    if bucket.is_last():
        state.start_all()
    return promised


def _pass_on(promised: torch.futures.Future[torch.Tensor], done: torch.futures.Future[torch.Tensor]) -> None:
    try:
        promised.set_result(done.value())
    except Exception as error:  # whatever it was, backward raises it
        promised.set_exception(error)  # type: ignore[arg-type]


def no_buffer_sync() -> dict[str, bool]:
    """The argument that leaves the buffers of batch normalisation alone in forward, by the name that this torch has."""
    known = inspect.signature(TorchDDP.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def traffic(model: nn.Module, case: Case, handle: Handle | None, world_size: int) -> Traffic:
    """Return a rank's bytes in a synchronized iteration: measured, or for torch's all-reduces computed."""
    payload = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    if case.ddp == "none":
        return Traffic()
    if handle is None:
        return Traffic(payload, 2 * (world_size - 1) / world_size * payload)
    stats = handle.stats()
    last = stats.last.traffic
    return Traffic(last.payload_bytes, last.sent_bytes, ratio(payload, last, world_size, stats.per_host))


def slice_mb(model: nn.Module, case: Case, world_size: int) -> float | None:
    """Return the MiB of payload of a slice; None for a setting that sends buckets."""
    if case.order == BACKWARD:
        return None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return wire_mb(case.compressor, Ranks(world_size), trained, case.bucket_mb)
