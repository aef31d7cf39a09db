"""Gradients on their way that torch does not wait for: backward ends when all are there."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from ...ddp_core import Pending
from ...ddp_core.engine.lanes import MODULES_IN_FLIGHT


class Stepped(Protocol):
    """An object that counts the steps of backward passes."""

    def begin_step(self) -> None:
        """The first gradients of a step come next."""

    def end_step(self) -> None:
        """End the step: all of its gradients are there."""


class Arrivals:
    """The gradients of one backward; on CUDA, where streams wait and no host does, each is waited for at once.

    Backwards inside of it, as of reentrant checkpoints, belong to it; where one of these brings the first gradients, only if
    the `model` was called as a whole. `in_flight`: how many modules' gradients may be on their way.
    """

    def __init__(
        self,
        steps: Stepped,
        model: nn.Module,
        device: torch.device,
        timeout: timedelta,
        in_flight: int | None = MODULES_IN_FLIGHT,
    ) -> None:
        self._steps, self._device, self._timeout, self._in_flight = steps, device, timeout, in_flight
        self._pendings: list[Pending] = []
        # what the backward under way calls at its end, and alone keeps; None where there is none, or one that broke off
        self._end: Callable[[], Callable[[], None] | None] = lambda: None
        self._begun = False  # the step of the backward under way
        weakref.finalize(self, model.register_forward_hook(OutputHooks(self)).remove)

    def backward_begins(self, _: Tensor | None = None) -> None:
        """Have the backward under way report its end, unless it is inside of one that does."""
        if self._end() is None:
            self._begun, end = False, self._backward_ends
            self._end = weakref.ref(end)
            Variable._execution_engine.queue_callback(end)

    def begin(self) -> None:
        """Gradients of a module come next: perhaps the first ones of a backward."""
        if torch._C._current_graph_task_id() != -1:
            self.backward_begins()
        if self._end() is None or not self._begun:
            self._wait(0)  # for what a backward left that broke off
            self._steps.begin_step()
            self._begun = True

    def take(self, pending: Pending, *, at_once: bool) -> None:
        """Wait for a module's gradients `at_once`, or let them arrive while backward goes on; not those of many modules."""
        outside = self._end() is None
        if at_once or outside or self._device.type != "cpu":
            pending.wait(self._timeout)
        else:
            self._pendings.append(pending)
            if self._in_flight is not None:
                self._wait(self._in_flight)
        if outside:  # nobody tells when the last module has come
            self._steps.end_step()

    @torch._disable_dynamo  # where a compiled function calls backward
    def _backward_ends(self) -> None:
        """Finish behind torch, which reduces the last gradients at the end of backward."""
        Variable._execution_engine.queue_callback(self._finish)

    @torch._disable_dynamo
    def _finish(self) -> None:
        self._end = lambda: None
        if self._begun:
            self._wait(0)
            self._steps.end_step()

    def _wait(self, left: int) -> None:
        while len(self._pendings) > left:
            self._pendings.pop(0).wait(self._timeout)


class OutputHooks:
    """A forward hook of a model. It has arrivals note where a backward from the outputs begins."""

    _arrivals: weakref.ref[Arrivals] | None = None  # in copies

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = weakref.ref(arrivals)

    def __call__(self, _model: nn.Module, _inputs: Any, outputs: Any) -> None:
        """Put hooks on the outputs of a forward."""
        if torch.compiler.is_compiling() or self._arrivals is None or (arrivals := self._arrivals()) is None:
            return
        for each in tree_leaves(outputs):
            if isinstance(each, Tensor) and each.grad_fn is not None:
                each.register_hook(arrivals.backward_begins)

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: a copy of the model has no handle."""
        return {}
