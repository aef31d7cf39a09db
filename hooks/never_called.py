"""Notices a handle that nobody calls: its model trains, and nothing is compressed."""

from __future__ import annotations

import warnings
import weakref

from torch import Tensor, nn

from ..ddp_core import Handle

ENOUGH = 3  # times that gradients begin anew
MESSAGE = (
    "the model gets gradients, but the compression's handle is not called: nothing is averaged by it. Is forward called on "
    "the DistributedDataParallel that the hook was registered on, not on its .module nor on a bare model that a framework "
    "was to wrap? Where a framework takes a hook and does not register it, call attach() on the model that it has wrapped"
)


class NeverCalled:
    """Watches a parameter until the handle was called; warns once where that does not happen."""

    def __init__(self, handle: Handle, parameter: Tensor) -> None:
        self._handle, self._parameter = weakref.ref(handle), weakref.ref(parameter)
        self._begun = 0
        self._hook = parameter.register_hook(self._gradient_comes)

    @classmethod
    def watch(cls, handle: Handle, model: nn.Module) -> None:
        """The first parameter of a model that gets gradients, if any does."""
        if (first := next((p for p in model.parameters() if p.requires_grad), None)) is not None:
            cls(handle, first)

    def _gradient_comes(self, _: Tensor) -> None:
        """A gradient is there, and not added yet to those before."""
        handle, parameter = self._handle(), self._parameter()
        if handle is None or parameter is None or handle.called:
            self._hook.remove()
        elif parameter.grad is None:
            self._begun += 1
            if self._begun == ENOUGH:
                self._hook.remove()
                warnings.warn(MESSAGE, stacklevel=2)
