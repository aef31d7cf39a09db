"""The parameters of a model, and the hooks that tell when their gradients are there."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .graph import add_hooks, gradient_node, remove


class HookedParameters:
    """Calls `fired(index, inputs, outputs)` after each of `parameters` has got a gradient, until an error detaches it.

    `names`: of the parameters, for messages.
    """

    def __init__(self, parameters: Sequence[Tensor], names: Sequence[str], fired: Callable[..., Any]) -> None:
        self._parameters, self._names = list(parameters), list(names)
        self._warned: set[str] = set()
        self._nodes = list(map(gradient_node, parameters))
        self._lock = threading.RLock()  # autograd has a thread for each GPU
        several = len({parameter.device for parameter in parameters}) > 1
        handles = add_hooks(self._nodes, fired, self._lock if several else None)
        self._detach = weakref.finalize(self, remove, handles)
        self._detach.atexit = False

    def names_of(self, indices: Iterable[int]) -> list[str]:
        """The names of parameters."""
        return [self._names[index] for index in indices]

    @property
    def device(self) -> torch.device:
        """Where the parameters are; of several devices, that of the first."""
        return self._parameters[0].device

    def detach(self) -> None:
        """Take the hooks off the parameters."""
        self._detach()

    def _failure(self, text: str) -> RuntimeError:
        """The error to raise; it averages no more, another one may."""
        self.detach()
        return RuntimeError(text)

    def _warn(self, reason: str, text: str) -> None:
        """Once for each reason."""
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(text, stacklevel=3)
