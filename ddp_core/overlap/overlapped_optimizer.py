"""The optimizer that `gradwire.overlap` makes: the same object, whose class notes that a step was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from .error_messages import CLOSURE

if TYPE_CHECKING:
    from .overlap import Overlap, OverlapReport
    from .partial_step import PartialStep


class OverlappedOptimizer(Optimizer):
    """Mixed into the class of an optimizer, whose object keeps its state, its groups and all who know it.

    Schedulers may be made before or after; `step` always tells them that it was called.
    """

    _overlap: Overlap
    _stepper: PartialStep
    _kind: type[Optimizer]

    @torch._disable_dynamo  # a compiled function may call it, and would miss what is under way
    @Optimizer.profile_hook_step  # which calls the user's hooks
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Note that a step was asked for, with the hyperparameters of now; make it for what has arrived."""
        if closure is not None:
            raise RuntimeError(CLOSURE)
        self._opt_called = True  # a scheduler asks
        self._overlap.step(self._stepper)

    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, those under way once they were used; nothing is waited for."""
        if not self._overlap.pending:
            return super().zero_grad(set_to_none)
        for group in self.param_groups:
            self._overlap.clear(group["params"], to_none=set_to_none)

    def drain(self) -> None:
        """Wait for all updates that are under way."""
        self._overlap.drain()

    def report(self) -> OverlapReport:
        """Return the wait of the last step, the bounds, and the lines of code that read too early."""
        return self._overlap.report()

    @property
    def state(self) -> Any:
        """By parameter, as after the last step that was asked for."""
        self._overlap.drain()
        return self.__dict__["state"]

    @state.setter
    def state(self, value: Any) -> None:
        self.__dict__["state"] = value

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as without overlap, after the last step that was asked for."""
        self._overlap.drain()
        return super().state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state, as without overlap."""
        self._overlap.drain()
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as without overlap."""
        self._overlap.drain()
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is one without overlap."""
        self._overlap.drain()
        return blank, (self._kind,), self.__getstate__()


def blank(kind: type[Optimizer]) -> Optimizer:
    """An optimizer that its state is still to make."""
    return kind.__new__(kind)


def check_step(optimizer: Optimizer) -> None:
    """Raise RuntimeError where something else than a scheduler has replaced the optimizer's `step`."""
    replaced = optimizer.__dict__.get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        raise RuntimeError(
            f"the optimizer's step() was replaced by {getattr(replaced, '__qualname__', replaced)}: call gradwire.overlap() "
            "before that"
        )


def overlapped(optimizer: Any, overlap: Overlap, stepper: PartialStep) -> None:
    """Let the optimizer's steps be `overlap`'s from now on, which has `stepper` take them."""
    optimizer.__dict__.pop("step", None)  # a scheduler's wrapper, which only notes the call
    kind = type(optimizer)
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_kind": kind}
    # Another object around it would not do: schedulers, scalers and the user's script hold this one, and call its `step`.
    optimizer.__class__ = type(kind.__name__, (OverlappedOptimizer, kind), named)
    optimizer._overlap, optimizer._stepper = overlap, stepper
