"""Sparse gradients: the rows that any rank used, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..compress.protocol import Program, all_gather
from .grad_bucket import GradBucket

SPARSE_ROUNDS = 2


class SparseBucket(GradBucket):
    """A bucket of one parameter whose gradient is a sparse tensor; its buffer is that tensor."""

    def __init__(self, index: int, members: Sequence[int], parameters: Sequence[Tensor], *, last: bool) -> None:
        self.members = tuple(members)
        self.scale = 1.0
        self._index, self._last = index, last
        self._parameters = list(parameters)
        self.open(1.0)

    def open(self, scale: float) -> None:
        """Make ready for a step's gradient."""
        self.waiting, self.future = 1, None

    def bring(self, index: int) -> None:
        """The gradient is ready."""
        self.waiting = 0

    def fill(self) -> None:
        """Take the gradient; without one, a tensor of no rows."""
        parameter = self._parameters[0]
        grad = parameter.grad
        if grad is not None and not grad.is_sparse:
            raise RuntimeError(
                "the weight of an embedding with sparse=True got a dense gradient, as it does where it is also used "
                "elsewhere: build the embedding with sparse=False"
            )
        self._buffer = no_rows(parameter) if grad is None else grad

    def clear(self) -> None:
        """No rows."""
        self._buffer = no_rows(self._parameters[0])

    def gradients(self) -> list[Tensor]:
        """The gradient."""
        return [self._buffer]

    def set_buffer(self, tensor: Tensor) -> None:
        """Let a hook work on another tensor."""
        self._buffer = tensor

    def deliver(self, average: Tensor, wanted: Callable[[int], bool]) -> None:
        """Make the average the parameter's gradient."""
        if wanted(self.members[0]):
            self._parameters[0].grad = average


def no_rows(parameter: Tensor) -> Tensor:
    """A sparse gradient of an embedding that was not used."""
    places = torch.zeros(1, 0, dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(places, parameter.new_zeros(0, *parameter.shape[1:]), parameter.shape)


def sparse_mean(grad: Tensor, world_size: int) -> Program[Tensor]:
    """The mean over ranks of a sparse tensor, coalesced: two all-gathers, of how many rows there are and of the rows.

    On a GPU the host waits for the number of rows.
    """
    grad = grad.coalesce()
    shape = grad.shape[grad.sparse_dim() :]
    positions = grad.indices().T.contiguous()
    values = grad.values().reshape(len(positions), shape.numel()) / world_size
    count = torch.tensor([len(positions)], device=grad.device)
    counts = (yield from all_gather(count)).view(-1).tolist()
    if not max(counts):
        return grad
    rows = torch.cat([positions.view(torch.uint8), values.view(torch.uint8)], dim=1)
    padding = rows.new_zeros(max(counts) - len(rows), rows.shape[1])
    gathered = yield from all_gather(torch.cat([rows, padding]))
    rows = torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])
    width = positions.itemsize * positions.shape[1]
    places = rows[:, :width].contiguous().view(torch.int64)
    numbers = rows[:, width:].contiguous().view(values.dtype).view(len(rows), *shape)
    return torch.sparse_coo_tensor(places.T, numbers, grad.shape).coalesce()
