"""The backwards of a model, which autograd announces to nobody, and hooks of its forwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

NOBODY: Callable[[], None] = type(None)  # called, it returns None


class BackwardCallback:
    """A backward under way, as the callback that autograd calls at its end. `at_end`: ends the step that has begun in it.

    autograd alone keeps it. So it is gone where backward broke off, which nothing else shows.
    """

    at_end: Callable[[], None] | None = None

    def __init__(self, backwards: Backwards) -> None:
        self._backwards = backwards

    @property
    def step_has_begun(self) -> bool:
        """True if a step has begun in this backward."""
        return self.at_end is not None

    @torch._disable_dynamo  # where a compiled function calls backward
    def __call__(self) -> None:
        """End behind torch, which hands over the last gradients at the end of backward."""
        Variable._execution_engine.queue_callback(self._end)

    @torch._disable_dynamo
    def _end(self) -> None:
        self._backwards.ended()
        if self.at_end is not None:
            self.at_end()


class Backwards:
    """The outermost backward under way: those inside of it, as of reentrant checkpoints, belong to it."""

    def __init__(self) -> None:
        self.now: Callable[[], BackwardCallback | None] = NOBODY  # the one under way; weakly, for it may break off

    def begin(self, _: Tensor | None = None) -> None:
        """Have the backward under way report its end, unless it is inside of one that does."""
        if self.now() is None:
            backward = BackwardCallback(self)
            self.now = weakref.ref(backward)
            Variable._execution_engine.queue_callback(backward)

    def ended(self) -> None:
        """Forget the one that has ended."""
        self.now = NOBODY

    def watch(self, outputs: Any) -> None:
        """Note where a backward from the outputs of a forward begins."""
        for each in tree_leaves(outputs):
            if isinstance(each, Tensor) and each.grad_fn is not None:
                each.register_hook(self.begin)


class ModelHook:
    """A hook of a model's forwards. It calls a method of an object, which it `keeps` alive with the model or not.

    The method of a forward hook gets the outputs, that of a forward pre-hook nothing.
    """

    _method: weakref.WeakMethod[Callable[..., None]] | None = None  # None in copies

    def __init__(self, method: Callable[..., None], *, keeps: bool = False) -> None:
        self._method, self._kept = weakref.WeakMethod(method), method if keeps else None

    def __call__(self, _model: nn.Module, _inputs: Any, *outputs: Any) -> None:
        """Call it, but not while the forward is compiled."""
        if torch.compiler.is_compiling() or self._method is None or (method := self._method()) is None:
            return
        method(*outputs)

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: a copy of the model has no handle."""
        return {}
