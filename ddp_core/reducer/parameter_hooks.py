"""Hooks that run when gradients of parameters are there."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from .autograd import gradient_node, keep_from_compiler


class ParameterHooks:
    """Calls `fired(owner, index, inputs, outputs)` after each of `parameters` has got a gradient, until `detach()`.

    `owner`: a weak reference. `nodes`: they accumulate the gradients. `lock`: held by `fired` where parameters lie on
    several devices, since autograd has a thread for each GPU.
    """

    def __init__(self, parameters: Sequence[Tensor], fired: Callable[..., Any], owner: weakref.ref[Any]) -> None:
        self.nodes = list(map(gradient_node, parameters))
        self.lock = threading.RLock()
        several_devices = len({parameter.device for parameter in parameters}) > 1
        fired = keep_from_compiler(_one_at_a_time(fired, self.lock) if several_devices else fired)
        handles = [node.register_hook(partial(fired, owner, index)) for index, node in enumerate(self.nodes)]
        self.detach = weakref.finalize(self, _remove, handles)  # takes the hooks off the parameters
        self.detach.atexit = False


def weak_call(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method, does not keep its object alive, and does nothing once that is gone."""
    me, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(*arguments: Any) -> Any:
        return None if (owner := me()) is None else function(owner, *arguments)

    return call


def _one_at_a_time(fired: Callable[..., Any], lock: threading.RLock) -> Callable[..., Any]:
    def alone(*arguments: Any) -> None:
        with lock:
            fired(*arguments)

    return alone


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()
