"""Averages on their way to the gradients, shown to a function of the user's, which may change them in place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ...compress import Layout, Program
from ..buckets.grad_bucket import as_real, as_views

OnAverage: TypeAlias = Callable[[Mapping[str, Tensor]], None]
Parts: TypeAlias = Callable[[Tensor], Mapping[str, Tensor]]  # of an average, by parameter
_one_at_a_time = threading.Lock()  # rounds of several buckets may end on several threads


class Shown:
    """Shows averages to `function`, if there is one."""

    def __init__(self) -> None:
        self.function: OnAverage | None = None

    def average_of(self, program: Program[Tensor], parts: Parts, names: Collection[str]) -> Program[Tensor]:
        """Run a program, and show the function the parts of its average that have these names."""
        function = self.function
        average = yield from program
        found = {name: part for name, part in parts(average).items() if name in names}
        if function is not None:
            with _one_at_a_time, torch.no_grad():
                function(found)
        return average


def parts_of_bucket(names: Sequence[str], templates: Sequence[Tensor], average: Tensor) -> dict[str, Tensor]:
    """Return the average of each parameter in its shape. `templates`: tensors of the memory formats of these."""
    if average.is_sparse:
        return {names[0]: average}
    return dict(zip(names, as_views(average, templates), strict=True))


def parts_of_slice(layout: Layout, average: Tensor) -> dict[str, Tensor]:
    """Return the average of each parameter's part in a slice, flat."""
    return dict(zip(layout.names, as_real(average).split(layout.sizes), strict=True))


def parts_of_row(names: Sequence[str], shapes: Sequence[Sequence[int]], average: Tensor) -> dict[str, Tensor]:
    """Return the average of this rank's shard of each parameter, with zeros where shards are padded."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return {
        name: part.view(shape) for name, shape, part in zip(names, shapes, average.view(-1).split(sizes), strict=True)
    }
