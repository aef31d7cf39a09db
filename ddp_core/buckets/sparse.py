"""Sparse gradients: the rows that any rank used, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...compress.protocol.requests import AllGather, Program
from .grad_bucket import GradBucket

SPARSE_ROUNDS = 2


class SparseBucket(GradBucket):
    """A bucket of one parameter whose gradient is a sparse tensor; its buffer is that tensor."""

    def __init__(self, index: int, members: Sequence[int], parameters: Sequence[Tensor], *, last: bool) -> None:
        self.members = tuple(members)
        self.number = self.place = index
        self._last = last
        self.all_parameters = list(parameters)
        self._sent, self.large = None, set()
        self.plan = None
        self.open(1.0)

    def open(self, scale: float) -> None:
        """Make ready for a step's gradient, which is not scaled on its way in."""
        self.scale, self.pending, self.absent = 1.0, None, []

    def fill(self, used: Sequence[int]) -> None:
        """Take the gradient; without one, a tensor of no rows."""
        parameter = self.all_parameters[0]
        grad = parameter.grad
        if grad is not None and not grad.is_sparse:
            raise RuntimeError(
                "the weight of an embedding with sparse=True got a gradient that is not sparse, as it does if it is used "
                "elsewhere, too: build the embedding with sparse=False"
            )
        self.absent = list(self.members) if grad is None else []
        self.flat = no_rows(parameter) if grad is None else grad.detach()

    def leave_out(self, members: Sequence[int]) -> None:
        """Nothing remembers the rows of a gradient."""

    def clear(self) -> None:
        """No rows."""
        self.flat = no_rows(self.all_parameters[0])

    def gradients(self) -> list[Tensor]:
        """The gradient."""
        return [self.flat]

    def set_buffer(self, tensor: Tensor) -> None:
        """Let a hook work on another tensor."""
        self.flat = tensor

    def deliver(self, average: Tensor, used: Sequence[int] | None) -> None:
        """Make the average the parameter's gradient, unless no rank used it."""
        self.flat = average
        if used is None or used[self.members[0]]:
            self.all_parameters[0].grad = average


def no_rows(parameter: Tensor) -> Tensor:
    """A sparse gradient of an embedding that was not used."""
    places = torch.zeros(1, 0, dtype=torch.int64, device=parameter.device)
    values = parameter.new_zeros(0, *parameter.shape[1:])
    return torch.sparse_coo_tensor(places, values, parameter.shape, check_invariants=False)


def sparse_mean(grad: Tensor, world_size: int) -> Program[Tensor]:
    """The mean over ranks of a sparse tensor, coalesced: two all-gathers, of how many rows there are and of the rows.

    On a GPU the host waits for the number of rows.
    """
    grad = (grad / world_size).coalesce()
    shape = grad.shape[grad.sparse_dim() :]
    positions, values = _bytes(grad.indices().T), _bytes(grad.values())
    count = torch.tensor([len(positions)], device=grad.device)
    counts = (yield AllGather(count)).view(-1).tolist()
    if not max(counts):
        return grad
    rows = torch.cat([positions, values], dim=1)
    padding = rows.new_zeros(max(counts) - len(rows), rows.shape[1])
    gathered = yield AllGather(torch.cat([rows, padding]))
    rows = torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])
    width = positions.shape[1]
    places = _numbers(rows[:, :width], torch.int64).view(len(rows), -1)
    numbers = _numbers(rows[:, width:], grad.dtype).view(len(rows), *shape)
    return torch.sparse_coo_tensor(places.T, numbers, grad.shape, check_invariants=False).coalesce()


def _bytes(table: Tensor) -> Tensor:
    """The rows of a table as bytes, (rows, bytes)."""
    width = table.itemsize * table.shape[1:].numel()
    return _packed(table).view(torch.uint8).view(len(table), width)


def _numbers(table: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers, flat."""
    return _packed(table).view(dtype)


def _packed(table: Tensor) -> Tensor:
    """A flat copy; one row alone counts as contiguous whatever its strides, which other dtypes do not fit."""
    return table.clone(memory_format=torch.contiguous_format).view(-1)
