"""The messages of ranks between steps, on the user's process group. All calls are collective, and block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .processes import explained

MESSAGE_BYTES = 250 * 1024 * 1024  # of one broadcast of many tensors
CARRIED = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
}  # by any group
CARRIED |= {torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool}


@contextmanager
def telling(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Have an error in the body say what ranks were telling each other."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"the ranks could not exchange {what}: one has died, hangs, or raised an error. {explained(error, group)}"
        ) from error


def exchange(
    text: str, group: dist.ProcessGroup, device: torch.device | None = None, *, what: str = "their measurements"
) -> list[str]:
    """Every rank's text, in rank order; the process group's own time limit applies. `what`: the texts are, for errors.

    `device`: this rank's.
    """
    texts: list[str] = [""] * group.size()
    with telling(what, group), _on(device):
        dist.all_gather_object(texts, text, group=group)
    return texts


def agree(
    text: str, group: dist.ProcessGroup, device: torch.device | None = None, *, what: str, way_out: str = ""
) -> None:
    """Raise ValueError on every rank unless all ranks pass the same text; `what`: as for `exchange`."""
    texts = exchange(text, group, device, what=what)
    differing = [rank for rank, other in enumerate(texts) if other != texts[0]]
    if differing:
        raise ValueError(
            f"the ranks were set up differently: rank 0 has {texts[0]}, rank {differing[0]} has {texts[differing[0]]}"
            + (f" (in all, ranks {differing} differ from rank 0)" if len(differing) > 1 else "")
            + way_out
        )


def gathered(value: Any, group: dist.ProcessGroup, device: torch.device, *, what: str) -> list[Any]:
    """On the first rank of the group what all ranks gave, in rank order; on the others an empty list."""
    values: list[Any] = [None] * group.size() if group.rank() == 0 else []
    with telling(what, group), _on(device):
        dist.gather_object(value, values or None, group=group, group_dst=0)
    return values


def scattered(values: Sequence[Any], group: dist.ProcessGroup, device: torch.device, *, what: str) -> Any:
    """This rank's one of the values that the first rank of the group gives, in rank order; those of others do not count."""
    mine: list[Any] = [None]
    with telling(what, group), _on(device):
        dist.scatter_object_list(mine, list(values) if group.rank() == 0 else None, group=group, group_src=0)
    return mine[0]


def _on(device: torch.device | None) -> AbstractContextManager[Any]:
    """Objects travel by way of the current device, which on CUDA may still be another one."""
    return torch.cuda.device(device) if device is not None and device.type == "cuda" else nullcontext()


def fan_out(row: Tensor, group: dist.ProcessGroup, root: int) -> None:
    """Rank `root` of the group sends each other rank a tensor like `row`; the process group's own time limit applies."""
    rows = [row] * group.size() if group.rank() == root else None
    with telling("the tensors of the root", group):
        dist.scatter(torch.empty_like(row), rows, group=group, group_src=root)


def fan_in(row: Tensor, group: dist.ProcessGroup, root: int) -> None:
    """Rank `root` of the group receives each rank's `row`; the process group's own time limit applies."""
    rows = [torch.empty_like(row) for _ in range(group.size())] if group.rank() == root else None
    with telling("their tensors with the root", group):
        dist.gather(row, rows, group=group, group_dst=root)


def averaged(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The mean over ranks of a tensor, in place; the process group's own time limit applies."""
    dist.all_reduce(values.mul_(1 / group.size()), group=group)
    return values


def start_sum(values: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to sum a tensor over ranks, in place. It does not block."""
    return group.allreduce([values])


def start_all_gather(out: Tensor, mine: Tensor, group: dist.ProcessGroup, *, async_op: bool) -> dist.Work | None:
    """Fill `out` with all ranks' tensors, one behind the other; `mine`, this rank's, may be its place in it."""
    return dist.all_gather_into_tensor(out, mine, group=group, async_op=async_op)


def start_scatter(rows: Tensor, output: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Begin to write to a flat `output` the sum over ranks of this one's part of `rows`. It does not block."""
    return dist.reduce_scatter_tensor(output, rows, group=group, async_op=True)


def start_all_to_all(rows: Tensor, out: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Begin to fill a flat `out` with the parts of all ranks' `rows` for this one, equally long. It does not block."""
    return dist.all_to_all_single(out, rows, group=group, async_op=True)


def largest_and_sum(first: float, second: float, group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    """The largest of all ranks' first numbers, and the sum of their second ones."""
    largest, total = torch.tensor([[first], [second]], dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(total, group=group)
    return float(largest), float(total)


def broadcast(tensors: Sequence[Tensor], source: int, group: dist.ProcessGroup, *, what: str) -> None:
    """Copy tensors from rank `source` of the group to all its ranks, many in one message. `what`: they are, for errors.

    Types that a group may not know, such as float8 and uint16, travel as bytes.
    """
    flats = {index: each.contiguous().view(-1) for index, each in enumerate(tensors) if each.dtype not in CARRIED}
    sent = [flats[index].view(torch.uint8) if index in flats else each for index, each in enumerate(tensors)]
    with telling(what, group):
        dist._broadcast_coalesced(group, sent, MESSAGE_BYTES, source)
    for index, flat in flats.items():
        if flat.data_ptr() != tensors[index].data_ptr():  # a copy, of one with gaps
            tensors[index].copy_(flat.view(tensors[index].shape))


def largest(value: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """The largest of all ranks' values."""
    values = torch.tensor([value], device=device)
    with telling("whether they have inputs left", group):
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return int(values)


def clone_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another group of the same ranks and kind, whose collectives wait for none of the first one's. A collective call."""
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(ranks, backend=dist.get_backend(group), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made
