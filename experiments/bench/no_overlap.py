"""No overlap: buckets wait until backward has computed its last gradient, and go then."""

# torch compares the annotations of a hook themselves, so this file must not postpone them.

from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ...compress import Spec
from ...ddp_core import Decorator, Handle


class DelayedBuckets:
    """The buckets of a backward that wait for the last one, with the futures that were promised for them."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.waiting: list[tuple[dist.GradBucket, torch.futures.Future[torch.Tensor]]] = []

    def start_all(self) -> None:
        """Start them all, in the order in which they got ready."""
        waiting, self.waiting = self.waiting, []
        for bucket, promised in waiting:
            self.handle.torch_steps.average(bucket).add_done_callback(partial(_pass_on, promised))


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


def communicate_after_backward(
    model: DistributedDataParallel,
    spec: Spec,
    groups: Sequence[dist.ProcessGroup],
    timeout: timedelta,
    transport: Decorator | None = None,
) -> Handle:
    """Register that hook on a DDP model of torch's or gradwire's, with a compressor of its own."""
    handle = Handle(spec, groups, timeout, transport=transport)
    handle.bind(model)
    model.register_comm_hook(DelayedBuckets(handle), delay_bucket)
    return handle
