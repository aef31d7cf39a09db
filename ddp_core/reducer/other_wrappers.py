"""Gradients that come while no wrapper averages: training that goes around it, and wrappers that share parameters."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

TIMES = 2  # updates of a parameter by gradients that nobody averages, until that is no accident
living: WeakSet[Any] = WeakSet()  # the reducers of this process


class Bypass:
    """Before the first forward of a wrapper: whether the model is trained without it."""

    def __init__(self) -> None:
        self._index: int | None = None  # of the parameter that got the first gradient
        self._version = self._updates = 0

    def trains(self, index: int, parameter: Tensor) -> bool:
        """Note a gradient of a parameter. Return True once it has come again after `TIMES` updates."""
        if self._index is None:
            self._index, self._version = index, parameter._version
        if index != self._index or parameter._version == self._version:
            return False
        self._version = parameter._version
        self._updates += 1
        return self._updates == TIMES


def shared(parameter: Tensor, mine: object) -> bool:
    """Return True if another wrapper averages the parameter, too. It looks at all objects: ask once."""
    if any(_among(parameter, each.parameters) for each in living if each is not mine):
        return True
    torch_s = (each for each in gc.get_objects() if type(each) is TorchDDP)  # torch keeps no list of them
    return any(_among(parameter, getattr(each, "_module_parameters", ())) for each in torch_s)


def _among(parameter: Tensor, others: Iterable[Tensor]) -> bool:
    return any(each is parameter for each in others)
