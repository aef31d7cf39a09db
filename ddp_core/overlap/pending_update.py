"""A bucket's average on its way, and the update of its parameters that waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..buckets.grad_bucket import GRADIENT, GradBucket
from ..reducer.backward import Backward
from .pending_parameter import mark_pending, restore


@dataclass(eq=False)
class PendingUpdate:
    """A bucket in flight. Its gradients are taken off the parameters, so that a late backward of an old graph, which adds
    to `.grad`, does not write to what is on its way.

    `before_use`: waits for an update and makes it, unless it was made. `steps`: those for these parameters that were asked
    for, by optimizer. `cleared`: the places of the parameters whose gradients are to be cleared after it, and whether to
    None. `needed`: when somebody first wanted it, and `arrived`: when it was there, by the step's marks; `waited`: between
    these, seconds of the host. `begun`: the update is being made, or was.
    """

    before_use: Callable[[PendingUpdate], None]
    bucket: GradBucket
    backward: Backward
    steps: dict[object, Callable[[], None]] = field(default_factory=dict)
    cleared: dict[int, bool] = field(default_factory=dict)
    needed: float = 0.0
    arrived: float = 0.0
    waited: float = 0.0
    begun: bool = False

    def __post_init__(self) -> None:
        self.parameters = self.bucket.all_parameters
        self._places = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        self._gradients = list(map(GRADIENT, self.parameters))
        for parameter in self.parameters:
            parameter.grad = None
            mark_pending(parameter, self)

    def clear(self, parameter: Tensor, *, to_none: bool) -> None:
        """Have a gradient cleared after the update."""
        place = self._places[id(parameter)]
        self.cleared[place] = to_none or self.cleared.get(place, False)
        with torch._C.DisableTorchFunctionSubclass():
            parameter.grad = None  # what a late backward has added goes, too

    @property
    def added_to(self) -> bool:
        """True if a backward of an older graph has added to a gradient since."""
        with torch._C.DisableTorchFunctionSubclass():
            return any(gradient is not None for gradient in map(GRADIENT, self.parameters))

    def precedes(self, optimizer: object, parameters: Iterable[Tensor]) -> bool:
        """Return True if the update comes before another step of an optimizer for some of its parameters.

        So it is once the loop has asked for the optimizer's step, or for cleared gradients of these parameters.
        """
        return optimizer in self.steps or any(self._places[id(each)] in self.cleared for each in parameters)

    def make(self, average: Tensor | None) -> None:
        """Hand out the average, if the bucket was sent, and update; then the parameters are plain ones again.

        Until then other threads that use them wait. Not on CUDA, where torch's optimizers choose what they do by the
        class, and threads order their streams anyway.
        """
        self.begun = True
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            added = list(map(GRADIENT, self.parameters))
            self._hand_out(average)
            if average is not None and average.is_cuda:
                self._restore()
            for step in self.steps.values():
                step()
            for place, to_none in self.cleared.items():
                clear_now(self.parameters[place], to_none=to_none)
            for parameter, gradient in zip(self.parameters, added, strict=True):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._restore()

    def _hand_out(self, average: Tensor | None) -> None:
        """Gradients are where they were, averaged; those that will be cleared are only lent by the bucket."""
        used = None if self.backward.usage is None else self.backward.usage.by_any()
        if (
            average is not None
            and used is None
            and len(self.cleared) == len(self.parameters)
            and all(self.cleared.values())
        ):
            self.bucket.lend(average)
            return
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = gradient
        if average is not None:
            self.bucket.deliver(average, used)

    def give_up(self) -> None:
        """Leave the parameters as they are, and their gradients this rank's own."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
                parameter.grad = gradient
        self._restore()

    def _restore(self) -> None:
        for parameter in self.parameters:
            if type(parameter) is not torch.nn.Parameter:
                restore(parameter)


def clear_now(parameter: Any, *, to_none: bool) -> None:
    """Clear the gradient of a parameter that nobody waits for."""
    if to_none:
        parameter.grad = None
    elif parameter.grad is not None:
        parameter.grad = parameter.grad.detach().zero_()
