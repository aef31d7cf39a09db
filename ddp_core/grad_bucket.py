"""The gradients of some parameters as one flat buffer, on their way to the process group and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .parameters import is_packed

LARGE = 1 << 15  # bytes; copying smaller gradients one by one costs more than it saves


class GradBucket:
    """A bucket of the reducer. A communication hook finds in it all that it knows of torch's `dist.GradBucket`.

    `members`: the parameters' indices in the model. `waiting`: of how many the gradient is still missing. `scale`: what
    gradients are multiplied by on their way in. With `alias`, gradients become views of the buffer, so that nothing is
    copied back.
    """

    def __init__(
        self, index: int, members: Sequence[int], parameters: Sequence[Tensor], *, last: bool, alias: bool
    ) -> None:
        self.members = tuple(members)
        self.waiting = len(members)
        self.future: torch.futures.Future[Tensor] | None = None
        self.scale = 1.0
        self._index, self._last, self._alias = index, last, alias
        self._parameters = list(parameters)
        first = parameters[0]
        numel = sum(parameter.numel() for parameter in parameters)
        self._flat = self._buffer = torch.zeros(numel, dtype=first.dtype, device=first.device)
        self._views = self._views_of(self._flat)
        self._places = {member: place for place, member in enumerate(self.members)}
        self._large = [not p.is_cuda and p.nbytes >= LARGE for p in self._parameters]
        self._filled = bytearray(len(self.members))

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        """Each gradient's part in the shape of its parameter, and in its strides where these have no gaps."""
        pieces = flat.split([parameter.numel() for parameter in self._parameters])
        return [
            piece.as_strided(parameter.shape, parameter.stride(), piece.storage_offset())
            if is_packed(parameter)
            else piece.view(parameter.shape)
            for piece, parameter in zip(pieces, self._parameters, strict=True)
        ]

    def index(self) -> int:
        """Its place in the order sent."""
        return self._index

    def buffer(self) -> Tensor:
        """All gradients, flat."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Let a hook work on another tensor of as many elements."""
        if tensor.numel() != self._flat.numel():
            raise ValueError(f"a bucket of {self._flat.numel()} elements cannot hold {tensor.numel()}")
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """Each parameter's part of the buffer, in its shape."""
        return self._views if self._buffer is self._flat else self._views_of(self._buffer)

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of the buffer."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether it is sent last."""
        return self._last

    def open(self, scale: float) -> None:
        """Make ready for a step's gradients."""
        self._buffer, self.scale, self.future = self._flat, scale, None
        self.waiting = len(self.members)
        self._filled = bytearray(len(self.members))

    def bring(self, index: int) -> None:
        """A gradient is ready. A large one is copied at once, while it is in the cache, and its memory is free again."""
        self.waiting -= 1
        place = self._places[index]
        if self._large[place]:
            self._copy(place)

    def _copy(self, place: int) -> None:
        parameter, view = self._parameters[place], self._views[place]
        grad = parameter.grad
        if grad is None:
            return
        if self.scale != 1.0:
            torch.mul(grad, self.scale, out=view)
        elif grad is not view:
            view.copy_(grad)
        if self._alias:
            parameter.grad = view
        self._filled[place] = 1

    def fill(self) -> None:
        """Bring in the gradients that are not there yet, together; zeros stand for those that are missing."""
        sources, targets, inside = [], [], []
        for place, parameter in enumerate(self._parameters):
            if self._filled[place]:
                continue
            view, grad = self._views[place], parameter.grad
            if grad is None:
                view.zero_()
                continue
            inside.append(view)
            if grad is not view:
                sources.append(grad)
                targets.append(view)
                if self._alias:
                    parameter.grad = view
        if sources:
            torch._foreach_copy_(targets, sources)
        if inside and self.scale != 1.0:
            if any(self._filled):
                torch._foreach_mul_(inside, self.scale)
            else:
                self._flat.mul_(self.scale)

    def clear(self) -> None:
        """Zeros, for a rank that has no gradients to give."""
        self._buffer = self._flat
        self._flat.zero_()

    def deliver(self, average: Tensor, wanted: Callable[[int], bool]) -> None:
        """Make the average the gradient of the parameters that are wanted, by index."""
        if average.data_ptr() != self._flat.data_ptr():
            self._flat.copy_(average.view(-1))
        grads, views = [], []
        for member, parameter, view in zip(self.members, self._parameters, self._views, strict=True):
            grad = parameter.grad
            if grad is view or not wanted(member):
                continue
            if grad is None:
                parameter.grad = view if self._alias else view.clone()
            else:
                grads.append(grad)
                views.append(view)
        if grads:
            torch._foreach_copy_(grads, views)
