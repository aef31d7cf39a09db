"""What ranks tell each other between steps, on the user's process group. All calls are collective, and block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

MESSAGE_BYTES = 250 * 1024 * 1024  # of one broadcast of many tensors


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Have an error in the body say what ranks were telling each other."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"the ranks did not tell each other {what}: one has died, hangs, or raised an error. {error}"
        ) from error


def exchange(
    text: str, group: dist.ProcessGroup, device: torch.device | None = None, *, what: str = "what they measured"
) -> list[str]:
    """Every rank's text, in rank order; the process group's own time limit applies. `what`: the texts are, for errors.

    `device`: this rank's. On CUDA texts travel by way of the current device, which may still be another one.
    """
    texts: list[str] = [""] * group.size()
    place = torch.cuda.device(device) if device is not None and device.type == "cuda" else nullcontext()
    with telling(what), place:
        dist.all_gather_object(texts, text, group=group)
    return texts


def averaged(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The mean over ranks of a tensor, in place; the process group's own time limit applies."""
    dist.all_reduce(values.mul_(1 / group.size()), group=group)
    return values


def start_sum(values: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to sum a tensor over ranks, in place. It does not block."""
    return group.allreduce([values])


def start_gather(output: Tensor, block: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Begin to write every rank's block to a flat `output`, in rank order. It does not block."""
    return dist.all_gather_into_tensor(output, block, group=group, async_op=True)


def start_scatter(rows: Tensor, output: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Begin to write to a flat `output` the sum over ranks of this one's part of `rows`. It does not block."""
    return dist.reduce_scatter_tensor(output, rows, group=group, async_op=True)


def largest_and_sum(first: float, second: float, group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    """The largest of all ranks' first numbers, and the sum of their second ones."""
    largest, total = torch.tensor([[first], [second]], dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(total, group=group)
    return float(largest), float(total)


def spread(tensors: Sequence[Tensor], source: int, group: dist.ProcessGroup, *, what: str) -> None:
    """Copy tensors from rank `source` of the group to all its ranks, many in one message. `what`: they are, for errors."""
    with telling(what):
        dist._broadcast_coalesced(group, list(tensors), MESSAGE_BYTES, source)


def largest(value: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """The largest of all ranks' values."""
    values = torch.tensor([value], device=device)
    with telling("whether they have inputs left"):
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return int(values)


def twin(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another group of the same ranks and kind, whose collectives wait for none of the first one's. A collective call."""
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(ranks, backend=dist.get_backend(group), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made
