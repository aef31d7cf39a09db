"""Gradients on their way that torch does not wait for: backward ends when all are there."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from ...ddp_core import Pending
from ...ddp_core.averaging.averager import CompressedAverager
from ...ddp_core.averaging.shard_averager import ShardAverager
from ...ddp_core.averaging.steps import Steps


class BackwardRun:
    """A backward under way, as the callback that autograd calls at its end. `begun`: it has brought gradients of a module.

    autograd alone keeps it. So it is gone where backward broke off, which nothing else shows.
    """

    begun = False

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals

    @torch._disable_dynamo  # where a compiled function calls backward
    def __call__(self) -> None:
        """Finish behind torch, which reduces the last gradients at the end of backward."""
        Variable._execution_engine.queue_callback(self._finish)

    @torch._disable_dynamo
    def _finish(self) -> None:
        self._arrivals.finish(self)


class Arrivals:
    """The gradients of one backward; on CUDA, where streams wait and no host does, each is waited for at once.

    Backwards inside of it, as of reentrant checkpoints, belong to it; where one of these brings the first gradients, only if
    the `model` was called as a whole. `before_end` is called when all are there, before the step ends: ranks agree then
    whether it counts.
    """

    def __init__(
        self,
        steps: Steps,
        model: nn.Module,
        device: torch.device,
        timeout: timedelta,
        before_end: Callable[[], None],
    ) -> None:
        self._steps, self._device, self._timeout, self._before_end = steps, device, timeout, before_end
        self._pendings: list[Pending] = []
        # the outermost backward that is under way; None where there is none, or one that broke off
        self._backward: Callable[[], BackwardRun | None] = lambda: None
        weakref.finalize(self, model.register_forward_hook(OutputHooks(self)).remove)

    def backward_begins(self, _: Tensor | None = None) -> None:
        """Have the backward under way report its end, unless it is inside of one that does."""
        if self._backward() is None:
            run = BackwardRun(self)
            self._backward = weakref.ref(run)
            Variable._execution_engine.queue_callback(run)

    def begin(self, averager: ShardAverager | CompressedAverager) -> None:
        """Gradients of a module come next, which an averager is to be given: perhaps the first ones of a backward."""
        if torch._C._current_graph_task_id() != -1:
            self.backward_begins()
        backward = self._backward()
        if backward is None or not backward.begun:
            self._wait(0)  # for what a backward left that broke off
            self._steps.begin()
        if backward is not None:
            backward.begun = True
        if not averager.inside:
            averager.enter_step()

    def take(self, pending: Pending, *, at_once: bool, in_flight: int | None = None) -> None:
        """Wait for a module's gradients `at_once`, or let them arrive while backward goes on.

        `in_flight`: how many modules' gradients may be on their way.
        """
        outside = self._backward() is None
        if at_once or outside or self._device.type != "cpu":
            pending.wait(self._timeout)
        else:
            self._pendings.append(pending)
            if in_flight is not None:
                self._wait(in_flight)
        if outside:  # nobody tells when the last module has come
            self._end()

    def finish(self, backward: BackwardRun) -> None:
        """End the step of a backward, if it was one."""
        self._backward = lambda: None
        if backward.begun:
            self._wait(0)
            self._end()

    def _end(self) -> None:
        self._before_end()
        self._steps.end()

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
