"""The buffers of a model, such as running means: sites average them with the last fragment."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...compress import Program
from ...compress.protocol.requests import all_reduce, together
from .reports import norm_of


class Buffers:
    """The buffers of a module that sites average: those of real numbers that it has now."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._shapes = {name: each.shape for name, each in module.named_buffers() if each.is_floating_point()}

    def _now(self) -> list[Tensor]:
        """Return the buffers as they are: a module may have replaced some, by others of their shapes."""
        now = dict(self._module.named_buffers())
        for name, shape in self._shapes.items():
            if name not in now or now[name].shape != shape:
                raise RuntimeError(
                    f"the buffer {name} of shape {tuple(shape)} is averaged over sites, and is not there any more or has "
                    "another shape: keep its shape, or leave it out of the model"
                )
        return [now[name] for name in self._shapes]

    def flat(self) -> Tensor:
        """Return a copy of the buffers one behind the other, in 64 bits where any of them has as many, else in 32."""
        now = self._now()
        dtype = torch.float64 if any(each.dtype == torch.float64 for each in now) else torch.float32
        empty = torch.empty(0, dtype=dtype)
        return torch.cat([empty, *(each.detach().to("cpu", dtype).reshape(-1) for each in now)])

    def take(self, flat: Tensor) -> None:
        """Set the buffers to these numbers."""
        now = self._now()
        for buffer, value in zip(now, flat.split([each.numel() for each in now]), strict=True):
            buffer.copy_(value.view(buffer.shape))


def change(buffers: Tensor, common: Tensor) -> Tensor:
    """Return the change of buffers since they were `common`, in 64 bits: 0 where one is infinite, such as in a mask."""
    return (buffers.double() - common).nan_to_num(0.0, 0.0, 0.0)


def within(buffers: Tensor, common: Tensor, most: float) -> Tensor:
    """Return buffers of which the change since `common` is scaled down to a norm of at most `most`."""
    if most == math.inf or (norm := norm_of(moved := change(buffers, common))) <= most:
        return buffers
    return torch.where(buffers.isfinite(), common + moved * (most / norm), buffers).to(buffers.dtype)


def with_buffers(averaging: Program[Tensor], buffers: Tensor) -> Program[Tensor]:
    """The average with the mean of the buffers behind it, in the wider type of both."""
    averages: list[Tensor] = yield from together(averaging, all_reduce(buffers))
    return torch.cat(averages)
