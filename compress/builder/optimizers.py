"""Agreement of a compressor and an optimizer: options that suit it, and one momentum only."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..algorithms.dgc import DGC
from ..feedback.worker_momentum import WorkerMomentum
from ..protocol.compressor import Compressor, inside
from ..protocol.registry import registered
from .build import Spec, check_depth, compressor, parsed, specification
from .defaults import FEEDBACK

logger = logging.getLogger(__name__)
O = TypeVar("O", bound=Optimizer)  # noqa: E741
KNOWN = ("SGD", "Adam", "NAdam", "RAdam", "RMSprop")  # how the names of those begin whose momentum can be taken away
DIVIDES = ("betas", "centered", "beta2_decay", "lr_decay", "rho")  # options of those that divide by a root mean square


def without_momentum(optimizer: O) -> O:
    """`optimizer` itself, its own momentum set to 0: for methods with `momentum=`, whose averages have it already.

    `momentum` and `nesterov` of SGD and RMSprop, and the first of `betas` of Adam and its kin, in all groups, also in those
    to come. A schedule that sets momentum, as OneCycleLR does, needs `cycle_momentum=False`. Raises TypeError for other
    optimizers.
    """
    kinds = [kind.__name__ for kind in type(_innermost(optimizer)).__mro__]
    if not any(name.startswith(KNOWN) for name in kinds):
        raise TypeError(
            f"without_momentum knows SGD, Adam, AdamW, NAdam, RAdam, Adamax and RMSprop, not {kinds[0]}: make it without "
            f"momentum yourself"
        )
    for each in (optimizer, _innermost(optimizer)):
        for group in (each.defaults, *each.param_groups):
            group.update(_without(group))
    return optimizer


def _without(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group that have to do with momentum, as they are without."""
    found: dict[str, Any] = {key: off for key, off in (("momentum", 0.0), ("nesterov", False)) if key in group}
    if "betas" in group:
        first, *others = group["betas"]
        found["betas"] = (torch.zeros_like(first) if isinstance(first, Tensor) else 0.0, *others)
    return found


def _innermost(optimizer: Any) -> Any:
    """The optimizer that wrappers of Accelerate, or ZeroRedundancyOptimizer, have inside."""
    for name in ("optimizer", "optim"):
        if isinstance(within := getattr(optimizer, name, None), Optimizer):
            return _innermost(within)
    return optimizer


def own_momentum(optimizer: Optimizer) -> float:
    """The largest momentum of any group: 0 where there is none."""
    return max(
        (float(group.get("momentum") or (group.get("betas") or (0.0,))[0]) for group in optimizer.param_groups),
        default=0.0,
    )


def kind(optimizer: Optimizer) -> str:
    """The optimizer as error feedback sees it: "Adam" (it divides by a root mean square), "SGD with momentum" or "SGD"."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer is a torch.optim.Optimizer, got {type(optimizer).__name__}")
    options = {option for group in optimizer.param_groups for option in group}
    if options.intersection(DIVIDES):
        return "Adam"
    return "SGD with momentum" if own_momentum(optimizer) else "SGD"


def tuned(spec: Spec, optimizer: Optimizer | None) -> Spec:
    """`spec` with the options of error feedback that suit `optimizer`, where it gives none of its own; logs which.

    A compressor that is an object stays as it is. Warns where both it and the optimizer have momentum.
    """
    if optimizer is None:
        return spec
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is a torch.optim.Optimizer, got {type(optimizer).__name__}")
    name, filled = type(_innermost(optimizer)).__name__, spec
    if isinstance(spec, str | Mapping):
        check_depth(spec)
        given = parsed(spec) if isinstance(spec, str) else spec
        changed = _filled(given, FEEDBACK.get(kind(optimizer), {}))
        if changed != given:
            filled = compressor(changed)
            logger.info("%s: %s with %s; options that are given stay", spec, specification(filled), name)
    _check_momentum(compressor(filled), optimizer, name)
    return filled


def _filled(given: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A specification with defaults by method in it, and in what it wraps."""
    filled, method = dict(given), registered.get(given.get("name", ""))
    inner = given.get("inner")
    if isinstance(inner, str | Mapping):
        filled["inner"] = _filled(parsed(inner) if isinstance(inner, str) else inner, defaults)
    if method is None or "error_feedback" in given:
        return filled
    return {**defaults.get(method.name, {}), **filled}


def _check_momentum(built: Compressor, optimizer: Optimizer, name: str) -> None:
    mine = next((each.momentum for each in inside(built) if isinstance(each, WorkerMomentum | DGC)), 0.0)
    if mine and (own := own_momentum(optimizer)):
        warnings.warn(
            f"{specification(built)} averages gradients with a momentum of {mine:g}, and {name} has one of {own:g} on top: "
            f"call gradwire.without_momentum(optimizer), or leave out momentum=",
            stacklevel=4,
        )
