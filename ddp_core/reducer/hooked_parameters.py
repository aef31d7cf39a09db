"""The parameters of a model, and the hooks that tell when their gradients are there."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .compiled import compiles
from .graph import gradient_node


class HookedParameters:
    """Calls `fired(index, inputs, outputs)` after each of `parameters` has got a gradient, until an error detaches it.

    `names`: of the parameters, for messages. `nodes`: that accumulate their gradients.
    """

    def __init__(self, parameters: Sequence[Tensor], names: Sequence[str], fired: Callable[..., Any]) -> None:
        self.parameters, self.names = list(parameters), list(names)
        self._warned: set[str] = set()
        self.nodes = list(map(gradient_node, parameters))
        self._lock = threading.RLock()  # autograd has a thread for each GPU
        if len({parameter.device for parameter in parameters}) > 1:
            fired = _one_at_a_time(fired, self._lock)
        self._fired, self._uncompiled = fired, False
        self._register(fired)

    def _register(self, fired: Callable[..., Any]) -> None:
        handles = [node.register_hook(partial(fired, index)) for index, node in enumerate(self.nodes)]
        self.detach = weakref.finalize(self, _remove, handles)  # takes the hooks off the parameters
        self.detach.atexit = False

    def keep_from_compiler(self) -> None:
        """Have no compiler go into the hooks where a compiled function calls backward; costs about a microsecond a hook."""
        if not self._uncompiled and compiles() and self.detach.alive:
            self.detach()
            self._register(torch._disable_dynamo(self._fired))
            self._uncompiled = True

    def names_of(self, indices: Iterable[int]) -> list[str]:
        """The names of parameters."""
        return [self.names[index] for index in indices]

    @property
    def device(self) -> torch.device:
        """Where the parameters are; of several devices, that of the first."""
        return self.parameters[0].device

    def _failure(self, text: str) -> RuntimeError:
        """The error to raise; it averages no more, another one may."""
        self.detach()
        return RuntimeError(text)

    def _warn(self, reason: str, text: str) -> None:
        """Once for each reason."""
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(text, stacklevel=3)


def _one_at_a_time(fired: Callable[..., Any], lock: AbstractContextManager[Any]) -> Callable[..., Any]:
    def alone(*arguments: Any) -> None:
        with lock:
            fired(*arguments)

    return alone


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()
