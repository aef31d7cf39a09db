"""The only place that calls collectives: a program's request becomes work on a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..compress.protocol import AllGather, AllReduce, AllToAll, Request

MESSAGE_BYTES = 250 * 1024 * 1024  # of one broadcast of many tensors


class Waitable(Protocol):
    """What is in flight: `torch.distributed.Work`, or something that waits for it and for more."""

    def wait(self, timeout: timedelta = ..., /) -> object:
        """Return when it has arrived; raise RuntimeError where it does not within the time limit."""


Pace: TypeAlias = Callable[[dist.Work, float], Waitable]  # of a collective just started, and the bytes this rank sends
_pace: Pace | None = None


@contextmanager
def pacing(pace: Pace) -> Iterator[None]:
    """In the body, every request of a program is waited for as `pace` says: a seam for links that are slower than real."""
    global _pace
    before, _pace = _pace, pace
    try:
        yield
    finally:
        _pace = before


@dataclass(frozen=True)
class Pending:
    """A collective in flight and the tensor that will hold its result."""

    work: Waitable
    reply: Tensor


def start(request: Request, group: dist.ProcessGroup) -> Pending:
    """Give a request to the process group; returns at once. The caller keeps the order the same on every rank."""
    work, reply = _given(request, group)
    return Pending(work if _pace is None else _pace(work, request.sent_bytes(group.size())), reply)


def _given(request: Request, group: dist.ProcessGroup) -> tuple[dist.Work, Tensor]:
    tensor = request.tensor
    if request.scope != "all":
        raise ValueError(f"collectives run over all ranks here, not over the scope {request.scope!r}")
    match request:
        case AllReduce(op=op):
            if op == "mean" and group.size() > 1:
                tensor.mul_(1 / group.size())  # as torch: bit for bit what its DDP gives
            return _started(dist.all_reduce(tensor, group=group, async_op=True)), tensor
        case AllGather():
            reply = tensor.new_empty(group.size(), *tensor.shape)
            work = dist.all_gather_into_tensor(reply.view(-1), tensor.reshape(-1), group=group, async_op=True)
            return _started(work), reply
        case AllToAll():
            reply = torch.empty_like(tensor)
            return _started(dist.all_to_all_single(reply, tensor, group=group, async_op=True)), reply
    raise TypeError(f"a program may yield AllReduce, AllGather or AllToAll; it yielded {request!r}")


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this rank is not a member of the process group that it reduces on")
    return work


def exchange(text: str, group: dist.ProcessGroup, device: torch.device | None = None) -> list[str]:
    """Every rank's text, in rank order. Blocks; the process group's own time limit applies.

    `device`: this rank's. On CUDA texts travel by way of the current device, which may still be another one.
    """
    texts: list[str] = [""] * group.size()
    with torch.cuda.device(device) if device is not None and device.type == "cuda" else nullcontext():
        dist.all_gather_object(texts, text, group=group)
    return texts


def averaged(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The mean over ranks of a tensor, in place. Blocks; the process group's own time limit applies."""
    dist.all_reduce(values.mul_(1 / group.size()), group=group)
    return values


def start_sum(values: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to sum a tensor over ranks, in place."""
    return group.allreduce([values])


def is_paced() -> bool:
    """Whether requests of programs are waited for as links that are slower than real would have it."""
    return _pace is not None


def spread(tensors: Sequence[Tensor], source: int, group: dist.ProcessGroup) -> None:
    """Copy tensors from rank `source` of the group to all its ranks, many in one message. Blocks."""
    dist._broadcast_coalesced(group, list(tensors), MESSAGE_BYTES, source)


def largest(value: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """The largest of all ranks' values. Blocks."""
    values = torch.tensor([value], device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return int(values)
