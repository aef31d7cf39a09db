"""The steps of FSDP2: each begins with the first gradients of a backward, and ends when all averages are there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import nn

from ...ddp_core import Pending
from ...ddp_core.averaging.averager import CompressedAverager
from ...ddp_core.averaging.shard_averager import ShardAverager
from ...ddp_core.averaging.steps import Steps
from ..backwards import Backwards, ModelHook
from .modules import ShardedModule

BROKEN = (
    "a backward of this model raised an error, and since then torch's FSDP2 and replicate() leave some or all parameters "
    "unchanged, without a word: end the training, and restart it from a checkpoint"
)


class Arrivals:
    """The gradients of one backward; on CUDA, where streams wait and no host does, each is waited for at once.

    Backwards inside of it, as of reentrant checkpoints, belong to it; where one of these brings the first gradients, only if
    the `model` was called as a whole: its outputs show the outer one. `before_end` is called when all are there, before the
    step ends: ranks agree then whether it counts.
    """

    def __init__(
        self,
        steps: Steps,
        model: nn.Module,
        device: torch.device,
        timeout: timedelta,
        before_end: Callable[[], None],
        modules: Sequence[ShardedModule],
    ) -> None:
        self._steps, self._device, self._timeout, self._before_end = steps, device, timeout, before_end
        self._pendings, self._modules = list[Pending](), modules
        self._backwards = Backwards()
        weakref.finalize(self, model.register_forward_hook(ModelHook(self._backwards.watch)).remove)
        refusal = ModelHook(self._refuse_broken)
        weakref.finalize(self, model.register_forward_pre_hook(refusal, prepend=True).remove)

    def _refuse_broken(self) -> None:
        """Raise RuntimeError in training behind a backward that broke off, whose state torch does not mend."""
        outside = torch._C._current_graph_task_id() == -1  # inside of a backward, as of a checkpoint, it is under way
        if outside and torch.is_grad_enabled() and any(each.in_backward for each in self._modules):
            raise RuntimeError(BROKEN)

    def begin(self, averager: ShardAverager | CompressedAverager) -> None:
        """Gradients of a module come next, which an averager is to be given: perhaps the first ones of a backward."""
        if self._backwards.now() is None and torch._C._current_graph_task_id() != -1:
            self._backwards.begin()
        backward = self._backwards.now()
        if backward is None or not backward.step_has_begun:
            self._wait(0)  # for what a backward left that broke off
            self._steps.begin()
        if backward is not None:
            backward.at_end = self._end
        if not averager.inside:
            averager.enter_step()

    def take(self, pending: Pending, *, at_once: bool, in_flight: int | None = None) -> None:
        """Wait for a module's gradients `at_once`, or let them arrive while backward goes on.

        `in_flight`: how many modules' gradients may be on their way.
        """
        outside = self._backwards.now() is None
        if at_once or outside or self._device.type != "cpu":
            pending.wait(self._timeout)
        else:
            self._pendings.append(pending)
            if in_flight is not None:
                self._wait(in_flight)
        if outside:  # nobody tells when the last module has come
            self._end()

    def _end(self) -> None:
        self._wait(0)
        self._before_end()
        self._steps.end()

    def _wait(self, left: int) -> None:
        while len(self._pendings) > left:
            self._pendings.pop(0).wait(self._timeout)
