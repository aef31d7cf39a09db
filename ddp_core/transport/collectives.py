"""What ranks tell each other between steps, on the user's process group. All calls are collective, and block."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

MESSAGE_BYTES = 250 * 1024 * 1024  # of one broadcast of many tensors


def exchange(text: str, group: dist.ProcessGroup, device: torch.device | None = None) -> list[str]:
    """Every rank's text, in rank order; the process group's own time limit applies.

    `device`: this rank's. On CUDA texts travel by way of the current device, which may still be another one.
    """
    texts: list[str] = [""] * group.size()
    with torch.cuda.device(device) if device is not None and device.type == "cuda" else nullcontext():
        dist.all_gather_object(texts, text, group=group)
    return texts


def averaged(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The mean over ranks of a tensor, in place; the process group's own time limit applies."""
    dist.all_reduce(values.mul_(1 / group.size()), group=group)
    return values


def start_sum(values: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to sum a tensor over ranks, in place. It does not block."""
    return group.allreduce([values])


def spread(tensors: Sequence[Tensor], source: int, group: dist.ProcessGroup) -> None:
    """Copy tensors from rank `source` of the group to all its ranks, many in one message."""
    dist._broadcast_coalesced(group, list(tensors), MESSAGE_BYTES, source)


def largest(value: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """The largest of all ranks' values."""
    values = torch.tensor([value], device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return int(values)
