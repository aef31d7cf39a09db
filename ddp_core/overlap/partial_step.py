"""An optimizer's step for some of its parameters, with the hyperparameters of the moment it was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Settings: TypeAlias = Sequence[dict[str, Any]]  # of each parameter group, but for its parameters
REFUSED = {  # optimizers of torch.optim that do not update each parameter by itself
    "LBFGS": "its step calls a closure and looks at all parameters together",
    "SparseAdam": "sparse gradients are not overlapped",
}


def check(optimizer: Optimizer, *, per_parameter: bool) -> None:
    """Raise TypeError or ValueError, with the way out, for an optimizer whose step cannot be taken bucket by bucket."""
    kind = type(optimizer)
    known = getattr(torch.optim, kind.__name__, None) is kind
    if known and kind.__name__ in REFUSED:
        raise TypeError(f"overlap() does not take {kind.__name__}: {REFUSED[kind.__name__]}; use it without overlap()")
    if not known and not per_parameter:
        raise TypeError(
            f"overlap() knows torch.optim's optimizers, and not {kind.__module__}.{kind.__qualname__}. Where it updates "
            "each parameter from that one's gradient and state alone, and keeps nothing else that changes with steps, pass "
            "per_parameter=True; else use it without overlap()"
        )
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise ValueError("overlap() does not take differentiable=True: the step is not part of a graph")
        if group.get("capturable"):
            raise ValueError("overlap() does not take capturable=True: a CUDA graph cannot contain waits on the host")


class PartialStep:
    """The step of `optimizer`, an object of the class `kind`, as one that takes some parameters only.

    A shallow copy of the optimizer steps, whose groups have those parameters and whose state is the same: bit for bit what
    a step of all does, since each parameter's update depends on its own gradient and state alone.
    """

    def __init__(self, optimizer: Optimizer, kind: type[Optimizer]) -> None:
        self._optimizer, self._kind = optimizer, kind
        step = kind.step
        self._step: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]

    def check_parameters(self, module: nn.Module) -> None:
        """Raise ValueError where the optimizer has none of a module's parameters, and TypeError for one of another class."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not any(self.members(trained)):
            raise ValueError(
                "the optimizer has none of the model's parameters: overlap() takes the one that updates them"
            )
        if other := next((type(each) for each in trained if type(each) is not nn.Parameter), None):
            raise TypeError(
                f"overlap() can watch torch.nn.Parameters only, and the model has a {other.__name__}: use "
                "the optimizer without overlap()"
            )

    def settings(self) -> Settings:
        """The hyperparameters as they are now."""
        return [
            {key: _kept(value) for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]

    def identity(self) -> list[int]:
        """Changes when parameters are added, or other lists of them take their place."""
        return [
            number for group in self._optimizer.param_groups for number in (id(group["params"]), len(group["params"]))
        ]

    def members(self, parameters: Iterable[Tensor]) -> list[list[Tensor]]:
        """Return those of the parameters that the optimizer has, by group, in its order."""
        wanted = set(map(id, parameters))
        return [[each for each in group["params"] if id(each) in wanted] for group in self._optimizer.param_groups]

    def others(self, parameters: Iterable[Tensor]) -> list[list[Tensor]]:
        """The optimizer's parameters without these, by group."""
        not_wanted = set(map(id, parameters))
        return [
            [each for each in group["params"] if id(each) not in not_wanted] for group in self._optimizer.param_groups
        ]

    def whole(self) -> None:
        """The step for all parameters."""
        self._step(self._shadow())

    def run(self, settings: Settings, members: Sequence[Sequence[Tensor]]) -> None:
        """The step for these parameters, by group."""
        groups = [{**group, "params": mine} for group, mine in zip(settings, members, strict=True) if mine]
        if not groups:
            return
        shadow = self._shadow()
        shadow.param_groups = groups
        self._step(shadow)

    def _shadow(self) -> Optimizer:
        shadow = self._kind.__new__(self._kind)
        shadow.__dict__.update(self._optimizer.__dict__)
        return shadow


def _kept(value: Any) -> Any:
    """A hyperparameter that a scheduler will not change: a rate may be a tensor."""
    return value.clone() if isinstance(value, Tensor) else value
