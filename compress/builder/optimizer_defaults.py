"""Agreement of a compressor and an optimizer: options that suit it, and one momentum only."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..algorithms.dgc import DGC
from ..feedback.worker_momentum import WorkerMomentum
from ..protocol.compressor import Compressor, inside
from ..protocol.registry import OF_FEEDBACK, find
from .build import Spec, check_depth, compressor, parsed, specification

logger = logging.getLogger(__name__)
Optimizers: TypeAlias = (
    Optimizer | Sequence[Optimizer]
)  # of one model, such as Muon for matrices and AdamW for the rest
O = TypeVar("O", bound=Optimizers)  # noqa: E741
KNOWN = ("SGD", "Adam", "NAdam", "RAdam", "RMSprop", "Muon", "NorMuon")  # names begin so if momentum can be taken away
MOMENTUM = {
    "momentum": 0.0,
    "mu": 0.0,
    "beta1": 0.0,
    "nesterov": False,
}  # options of momentum, and their values without
# options of those that divide by a root mean square; and of Lion, which takes signs and counts as Adam
LIKE_ADAM = ("betas", "centered", "beta2_decay", "lr_decay", "rho")
ORTHONORMALISE = (
    "Muon",
    "Dion",
)  # in the names of those that do; the Muons of other packages may run Adam for some groups
BESIDE = ("adam", "adamw", "lion")  # what such a group's "algorithm" is then; or its "use_muon" is False
# {kind of optimizer: {compressor: part of a residual that it keeps}}; what is not listed keeps the compressor's own default.
# Near what docs/results/quality and docs/results/loss found.
FEEDBACK: Mapping[str, Mapping[str, float]] = {
    "SGD with momentum": {"ternary": 0.8, "topk": 0.9, "batched-powersgd": 0.9, "acp-powersgd": 0.9},
    "Adam": {"int4": 0.0, "int2": 0.0, "topk": 0.9},
    "Muon": {"topk": 0.9},
}


def without_momentum(optimizer: O) -> O:
    """Set an optimizer's own momentum to 0, for compressors with `momentum=`: their averages contain the momentum already.

    It sets `momentum` and `nesterov` of SGD, RMSprop and Muon, and the first of `betas` of Adam and its kin, in all
    parameter groups, later ones too. A schedule that sets momentum, such as OneCycleLR, needs `cycle_momentum=False`.

    Args:
        optimizer: the optimizer, or a list.

    Returns:
        The same optimizer or list.

    Raises:
        TypeError: the optimizer is of another kind.
    """
    several = optimizers_of(optimizer)
    for names in map(_names, several):
        if not any(name.startswith(KNOWN) for name in names):
            raise TypeError(
                f"without_momentum knows SGD, Adam, AdamW, NAdam, RAdam, Adamax, RMSprop, Muon and NorMuon, not {names[0]}: "
                f"make it without momentum yourself"
            )
    for each in (*several, *map(innermost, several)):
        for group in (each.defaults, *each.param_groups):
            group.update(_without(group))
    return optimizer


def optimizers_of(optimizer: object) -> tuple[Optimizer, ...]:
    """Return the optimizers given, one or several. Raises TypeError for anything else."""
    several = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    if not several or not all(isinstance(each, Optimizer) for each in several):
        given = ", ".join(type(each).__name__ for each in several) or "none"
        raise TypeError(f"optimizer is a torch.optim.Optimizer, or a list of several; got {given}")
    return several


def _names(optimizer: Optimizer) -> list[str]:
    """The names of an optimizer's classes, its own first."""
    return [kind.__name__ for kind in type(innermost(optimizer)).__mro__]


def _without(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group that have to do with momentum, as they are without."""
    found: dict[str, Any] = {key: off for key, off in MOMENTUM.items() if key in group}
    if "betas" in group:
        first, *others = group["betas"]
        found["betas"] = (torch.zeros_like(first) if isinstance(first, Tensor) else 0.0, *others)
    return found


def innermost(optimizer: Any) -> Any:
    """The optimizer that wrappers of Accelerate, or ZeroRedundancyOptimizer, have inside."""
    for name in ("optimizer", "optim"):
        if isinstance(within := getattr(optimizer, name, None), Optimizer):
            return innermost(within)
    return optimizer


def own_momentum(optimizer: Optimizers) -> float:
    """The largest momentum of any group of any optimizer: 0 where there is none."""
    return max((_momentum(group) for each in optimizers_of(optimizer) for group in each.param_groups), default=0.0)


def _momentum(group: Mapping[str, Any]) -> float:
    betas = group.get("betas") or (0.0,)
    return max(float(value) for value in (*(group.get(key) or 0.0 for key in MOMENTUM if key != "nesterov"), betas[0]))


def kinds(optimizer: Optimizers) -> set[str]:
    """Return the kinds of the optimizers of matrices, as error feedback sees them; of all parameters without matrices.

    "Adam" divides by a root mean square, or takes signs as Lion does, "Muon" makes all singular values equal; "SGD with
    momentum", "SGD".
    """
    groups = [(_names(each), group) for each in optimizers_of(optimizer) for group in each.param_groups]
    of_matrices = [(names, group) for names, group in groups if any(each.dim() > 1 for each in group["params"])]
    return {_kind(names, group) for names, group in of_matrices or groups}


def _kind(names: Sequence[str], group: Mapping[str, Any]) -> str:
    """Return the kind of an optimizer, whose classes have these names, for a group."""
    beside = group.get("algorithm") in BESIDE or group.get("use_muon") is False
    if not beside and (group.get("use_muon") or any(part in name for part in ORTHONORMALISE for name in names)):
        return "Muon"
    if beside or not group.keys().isdisjoint(LIKE_ADAM):
        return "Adam"
    return "SGD with momentum" if _momentum(group) else "SGD"


def tuned(spec: Spec, optimizer: Optimizers | None) -> Spec:
    """Add the options of error feedback that suit an optimizer, as far as a compressor has none of its own; log which.

    The optimizers of matrices decide. Of several kinds, the smallest feedback above 0 decides; it is 0 if it is
    for all.

    Args:
        spec: the compressor. An object stays as it is.
        optimizer: the optimizer, a list, or None, which changes nothing.

    Returns:
        The compressor with its options.

    Raises:
        ValueError: the compressor is unknown or has a wrong option.
    """
    if optimizer is None:
        return spec
    several, filled = optimizers_of(optimizer), spec
    name = " and ".join(_names(each)[0] for each in several)
    if isinstance(spec, str | Mapping):
        check_depth(spec)
        given = parsed(spec) if isinstance(spec, str) else spec
        changed = _filled(given, _feedback_for(kinds(several)))
        if changed != given:
            filled = compressor(changed)
            logger.info("%s: %s with %s; options that are given stay", spec, specification(filled), name)
    _check_momentum(compressor(filled), several, name)
    return filled


def for_adam(spec: Spec) -> str | None:
    """Return the text of a compressor with the options that suit Adam; None if it leaves open none of these.

    >>> for_adam("int4"), for_adam("int8"), for_adam("int4:error_feedback=true")
    ('int4:error_feedback=false', None, None)
    """
    if not isinstance(spec, str | Mapping):
        return None
    compressor(spec)  # imports what it names
    given = parsed(spec) if isinstance(spec, str) else spec
    changed = _filled(given, FEEDBACK["Adam"])
    return None if changed == given else specification(compressor(changed))


def tuned_specification(spec: str, optimizer: Optimizers | None) -> str:
    """Return the text of a compressor with the options that `tuned` adds for an optimizer."""
    filled = tuned(spec, optimizer)
    return spec if filled is spec else specification(compressor(filled))


def _feedback_for(found: Collection[str]) -> dict[str, float]:
    """Return the part of a residual, by method, that suits kinds of optimizers: of several the smallest.

    Error feedback is off only if it is for all of them.
    """
    chosen: dict[str, float] = {}
    tables = [FEEDBACK.get(kind, {}) for kind in sorted(found)]
    for method, kept in (row for table in tables for row in table.items()):
        if kept > 0 or all(table.get(method) == kept for table in tables):
            chosen[method] = min(kept, chosen.get(method, kept))
    return chosen


def _filled(given: Mapping[str, Any], kept: Mapping[str, float]) -> dict[str, Any]:
    """A specification with the part of a residual by method in it, and in what it wraps.

    Who gives an option of error feedback wants it: then no default turns it off.
    """
    filled, method = dict(given), find(given.get("name", ""))
    inner = given.get("inner")
    if isinstance(inner, str | Mapping):
        filled["inner"] = _filled(parsed(inner) if isinstance(inner, str) else inner, kept)
    if (
        method is None
        or method.name not in kept
        or (not kept[method.name] and not given.keys().isdisjoint(OF_FEEDBACK))
    ):
        return filled
    return {"error_feedback": kept[method.name], **filled}


def _check_momentum(built: Compressor, optimizers: Sequence[Optimizer], name: str) -> None:
    mine = next((each.momentum for each in inside(built) if isinstance(each, WorkerMomentum | DGC)), 0.0)
    if mine and (own := own_momentum(optimizers)):
        warnings.warn(
            f"{specification(built)} averages gradients with a momentum of {mine:g}, and {name} has one of {own:g} on top: "
            f"call gradwire.without_momentum(optimizer), or leave out momentum=",
            stacklevel=4,
        )
