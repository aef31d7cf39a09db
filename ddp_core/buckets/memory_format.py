"""The memory formats that torch's DDP may change: the places of gradients' elements in its buckets afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from ...compress import Program
from .grad_bucket import as_numbers, as_views, axis_order

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of axes


def templates_in(bucket: dist.GradBucket, strides: Mapping[Tensor, tuple[int, ...]]) -> list[Tensor]:
    """Return tensors in the memory format that each parameter's gradient has in a bucket of torch's.

    torch lays gradients out as the parameters lay when it made the bucket: at the wrap, and once more after the first step.
    `model.to(memory_format=...)` may have come since. `strides`: of the parameters when the compression got to know them.
    """
    parameters = bucket.parameters()
    pieces = as_numbers(bucket.buffer(), parameters).split([each.numel() for each in parameters])
    return [_template(piece, each, strides.get(each)) for piece, each in zip(pieces, parameters, strict=True)]


def as_form(tensor: Tensor) -> Tensor:
    """Return a tensor of no memory in the memory format of this one."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@dataclass(frozen=True)
class Turnable:
    """A parameter of several axes in a bucket of torch's, from element `start` on. `form`: as `as_form`, of its gradient."""

    parameter: Tensor
    start: int
    form: Tensor

    def turned(self, buffer: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return its average in the buffer's memory format, and as torch reads it there; None where these are the same."""
        if self.parameter.stride() == self.form.stride() or axis_order(self.parameter) == axis_order(self.form):
            return None
        piece = as_numbers(buffer, [self.form]).narrow(0, self.start, self.form.numel())
        return as_views(piece, [self.form])[0], as_views(piece, [self.parameter])[0]


def turnable(named: Mapping[str, Tensor], forms: Sequence[Tensor]) -> dict[str, Turnable]:
    """The parameters of a bucket of torch's that may change their memory format, by name; most models have none."""
    starts = accumulate((form.numel() for form in forms), initial=0)
    found = zip(named.items(), starts, forms, strict=False)
    return {name: Turnable(each, start, form) for (name, each), start, form in found if form.dim() > 2}


def as_torch_reads(program: Program[Tensor], turned: Sequence[tuple[Tensor, Tensor]]) -> Program[Tensor]:
    """Run a program, and lay out its average as torch reads it.

    Where torch copies gradients, it writes them into a bucket as parameters lay when it made the bucket, and reads what a
    hook returns as they lie now.
    """
    average = yield from program
    for there, here in turned:
        here.copy_(there.clone())
    return average


def _template(piece: Tensor, parameter: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    grad = parameter.grad
    if grad is not None and grad.layout != torch.strided:
        return parameter
    if grad is not None and grad.data_ptr() == piece.data_ptr() and grad.numel():
        return grad  # a view of the buffer
    found: dict[tuple[int, ...], Tensor] = {}
    for each in _formats(parameter, strides):
        found.setdefault(tuple(axis_order(each)), each)
    ways = [as_views(piece, [each])[0] for each in found.values()]
    if len(ways) == 1 or grad is None:
        return ways[0]
    return next((each for each in ways if torch.equal(each, grad.to(each.dtype))), ways[0])


def _formats(parameter: Tensor, strides: tuple[int, ...] | None) -> Iterator[Tensor]:
    """Tensors of no memory in the formats that a parameter may have had, the likeliest first."""
    if strides is not None:
        yield torch.empty_strided(parameter.shape, strides, device="meta")
    now = torch.empty_strided(parameter.shape, parameter.stride(), device="meta")
    yield now
    yield now.contiguous()
    if parameter.dim() in FORMATS:
        yield now.contiguous(memory_format=FORMATS[parameter.dim()])
