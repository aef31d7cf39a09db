"""Parts of a model that are averaged one after the other, so that the wire is used evenly."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

from ...compress import Layout
from ...compress.protocol import working_dtype

CPU = torch.device("cpu")


class Fragment:
    """Some parameters of the model, and on the CPU what all sites had in common of them when they last averaged them.

    `anchor`: that, flat, float32 or wider; `momentum`: the outer optimizer's; `captured`: what the parameters here were when
    their difference was taken, as long as its average is awaited.
    """

    def __init__(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.parameters = dict(parameters)  # not their memory, which a loop may replace
        shapes = tuple(tuple(_real(parameter).shape) for parameter in self.parameters.values())
        self.layout = Layout(tuple(self.parameters), shapes, dtype, CPU)
        self.anchor = self.now()
        self.momentum = torch.zeros_like(self.anchor)
        self.captured: Tensor | None = None

    def now(self) -> Tensor:
        """The parameters as they are here, flat."""
        flat = torch.empty(self.layout.numel, dtype=self.layout.dtype)
        for place, parameter in zip(self.layout.views(flat).values(), self.parameters.values(), strict=True):
            place.copy_(_real(parameter))
        return flat

    def capture(self) -> Tensor:
        """How far training here has moved the parameters away from the anchor."""
        self.captured = self.now()
        return self.anchor - self.captured

    def follow(self) -> None:
        """Move the parameters to the anchor, and on by what training here has changed since they were captured."""
        assert self.captured is not None
        moved = self.now().sub_(self.captured).add_(self.anchor)  # exactly the anchor where nothing has changed
        self.captured = None
        self._put(moved)

    def reset(self) -> None:
        """Take the anchor for the parameters; what training here has changed is dropped."""
        self.captured = None
        self._put(self.anchor)

    def _put(self, flat: Tensor) -> None:
        for parameter, value in zip(self.parameters.values(), self.layout.views(flat).values(), strict=True):
            _real(parameter).copy_(value)


def _real(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    return torch.view_as_real(detached) if detached.is_complex() else detached


def fragments(parameters: Mapping[str, Tensor], count: int) -> list[Fragment]:
    """At most so many, of neighbouring parameters, about equally large. Raises ValueError where there are none."""
    if not parameters:
        raise ValueError("the model has no parameters that require gradients: there is nothing to average")
    dtypes = {working_dtype(parameter.dtype.to_real()) for parameter in parameters.values()}
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    total = sum(parameter.numel() for parameter in parameters.values())
    ends = accumulate(parameter.numel() for parameter in parameters.values())
    groups: dict[int, dict[str, Tensor]] = {}
    for end, (name, parameter) in zip(ends, parameters.items(), strict=True):
        middle = end - parameter.numel() / 2
        groups.setdefault(int(middle * count / max(total, 1)), {})[name] = parameter
    return [Fragment(group, dtype) for group in groups.values()]
