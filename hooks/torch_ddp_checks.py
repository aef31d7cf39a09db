"""Uses that torch's DDP does not support with a communication hook and does not report, and a hook that nobody calls."""

# torch compares the annotations of a hook themselves, so this file must not postpone them.

import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..ddp_core import Handle, Strays, gradient_node, keep_from_compiler, removed, trained_now

WRAP_ANEW = "After such a change, wrap the model anew in DistributedDataParallel, attach, and load this handle's state"
JOIN = (
    "join(divide_by_initial_world_size=False) does not go with a communication hook: torch does not inform hooks of ranks "
    "without inputs, so gradients would be divided by all of them. Leave that argument out, or use "
    "gradwire.DistributedDataParallel with compressor=..., which takes it"
)

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


class Guard:
    """A forward pre-hook of a DDP model, and a look at the buckets of its first step.

    Raises ValueError inside a `join` whose averages would be wrong, and RuntimeError where parameters that were averaged are
    no longer, or where a hook of the user's clears gradients before they are averaged. Warns of added parameters.
    """

    strays: Strays | None = None  # None in copies, and where the wrapper notices them by itself

    def __init__(self, ddp: DistributedDataParallel, *, own: bool) -> None:
        if own:
            return
        named = trained_now(ddp.module)[0]
        nodes = list(map(gradient_node, named.values()))
        self.strays = Strays(named, nodes, ddp.module, WRAP_ANEW)
        self._came: dict[int, int] = {}  # by index of a parameter, the backward that has brought its gradient
        self._first: int | None = None  # the backward of the first step
        self._names = list(named)
        self._places = {id(parameter): place for place, parameter in enumerate(named.values())}
        self._hooks = [node.register_prehook(partial(_note, self._came, place)) for place, node in enumerate(nodes)]

    def __call__(self, ddp: DistributedDataParallel, _: Any) -> None:
        """Look at the model before a forward."""
        if torch.compiler.is_compiling():
            return
        divides = getattr(ddp, "_divide_by_initial_world_size", True) and getattr(
            ddp, "divide_by_initial_world_size", True
        )
        if ddp._join_config.enable and not divides:
            raise ValueError(JOIN)
        synced = torch.is_grad_enabled() and ddp.require_backward_grad_sync and ddp.process_group.size() > 1
        if self.strays is not None and synced:
            self.strays.check(lambda: trained_now(ddp.module)[0])

    def refuse_taken(self, bucket: dist.GradBucket) -> bool:
        """Look at a bucket of the first step. Return False after that step: it need not be called again."""
        backward = torch._C._current_graph_task_id()
        self._first = backward if self._first is None else self._first
        if backward != self._first:
            for hook in self._hooks:
                hook.remove()
            return False
        places = [self._places.get(id(parameter), -1) for parameter in bucket.parameters() if parameter.grad is None]
        if names := [self._names[place] for place in places if self._came.get(place) == backward]:
            raise RuntimeError(removed(names))
        return True

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: a copy of the model has other parameters."""
        return {}


@keep_from_compiler
def _note(came: dict[int, int], place: int, gradients: Sequence[Tensor | None]) -> None:
    if gradients[0] is not None:  # it is where an output that no loss depends on led to the parameter
        came[place] = torch._C._current_graph_task_id()


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
