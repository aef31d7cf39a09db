"""Notices a handle that nobody calls: its model trains, and nothing is compressed."""

from __future__ import annotations

import warnings
import weakref

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..ddp_core import Handle, keep_from_compiler

ENOUGH = 3  # times that gradients begin anew
MESSAGE = (
    "the model gets gradients, but the compression's handle is not called: nothing is averaged by it. Is forward called on "
    "the DistributedDataParallel that the hook was registered on, not on its .module nor on a bare model that a framework "
    "was to wrap? Where a framework takes a hook and does not register it, call attach() on the model that it has wrapped"
)
IN_NO_SYNC = (
    "the model gets gradients inside no_sync() alone, so the compression's handle is not called: it compresses nothing. "
    "Accelerate's LocalSGD trains like this, and averages the parameters uncompressed. For compressed local SGD use "
    "gradwire.LocalSteps on the bare model instead of both; otherwise leave no_sync() for the last backward of each step"
)


class NeverCalled:
    """Watches a parameter of a model until the handle was called; warns once where that does not happen."""

    def __init__(self, handle: Handle, model: nn.Module, parameter: Tensor) -> None:
        self._handle, self._model, self._parameter = weakref.ref(handle), weakref.ref(model), weakref.ref(parameter)
        self._begun = 0
        self._hook = parameter.register_hook(self._gradient_comes)

    @classmethod
    def watch(cls, handle: Handle, model: nn.Module) -> None:
        """The first parameter of a model that gets gradients, if any does."""
        if (first := next((p for p in model.parameters() if p.requires_grad), None)) is not None:
            cls(handle, model, first)

    @keep_from_compiler
    def _gradient_comes(self, _: Tensor) -> None:
        """A gradient is there, and not added yet to those before."""
        handle, model, parameter = self._handle(), self._model(), self._parameter()
        if handle is None or parameter is None or handle.called:
            self._hook.remove()
        elif parameter.grad is None:
            self._begun += 1
            if self._begun == ENOUGH:
                self._hook.remove()
                unsynced = isinstance(model, DistributedDataParallel) and not model.require_backward_grad_sync
                warnings.warn(IN_NO_SYNC if unsynced else MESSAGE, stacklevel=2)
