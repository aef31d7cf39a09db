"""`gradwire.overlap`: communication that goes on while the next forward runs."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from ..compress import Optimizers, optimizers_of
from ..ddp_core.module import DistributedDataParallel
from ..ddp_core.overlap import messages
from ..ddp_core.overlap.overlap import Overlap
from ..ddp_core.overlap.overlapped_optimizer import OverlappedOptimizer, check_step, overlapped
from ..ddp_core.overlap.partial_step import PartialStep, check
from ..ddp_core.overlap.slice_order import ORDERS

WRAPPERS = ("accelerate", "lightning")  # modules of optimizers that have another one inside
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizers)


def overlap(
    model: nn.Module,
    optimizer: AnyOptimizer,
    *,
    order: str = "auto",
    slice_mb: float | None = None,
    per_parameter: bool = False,
) -> AnyOptimizer:
    """Let the averages of a step arrive during the next forward, each before its first use. All ranks call it.

    `optimizer = gradwire.overlap(model, optimizer)`; the loop stays as it was, and so do the results, bit for bit those of
    `order="synchronous"`. Returns the optimizer itself, with two more methods: `drain()` waits for all that is under way,
    `report()` tells what was waited for. A list of optimizers, such as Muon for matrices and AdamW for the rest, comes back
    as it is. `model`: wrapped in gradwire.DistributedDataParallel.

    `order`: of what is sent. "auto" finds it from measured times, and waits at the end of backward as long as nothing
    promises 3 %; "priority" always overlaps, first what forward needs first; "backward" overlaps without another order;
    "synchronous" does not overlap. `slice_mb`: MiB on the wire of what is sent at once; by default 2, or less where that is
    more than an eighth of the model. Large parameters are cut, but not by compressors that remember more of them than
    numbers that were held back. `per_parameter`: an optimizer that is not torch's updates each parameter from its own
    gradient and state alone.

    Raises TypeError or ValueError for a model, an optimizer or a value that this cannot be, and RuntimeError where the model
    or the optimizer is overlapped already, or a communication hook averages; each says what to do.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(messages.not_ours(model))
    if order not in ORDERS:
        raise ValueError(f"the order is one of {', '.join(ORDERS)}; got {order!r}")
    if slice_mb is not None and not (isinstance(slice_mb, int | float) and 0 < slice_mb < float("inf")):
        raise ValueError(f"slice_mb is a number of MiB above 0, got {slice_mb!r}")
    inside = [_inside(each) for each in optimizers_of(optimizer)]
    if any(isinstance(each, OverlappedOptimizer) for each in inside):
        raise RuntimeError(
            "the optimizer is overlapped already: one call of overlap() for a model, with all of its optimizers"
        )
    for each in inside:
        check(each, per_parameter=per_parameter)
        check_step(each)
    steppers = [PartialStep(each, type(each)) for each in inside]
    result = Overlap(model.module, steppers, order, slice_mb)
    model.overlap(result)
    for around, each, stepper in zip(optimizers_of(optimizer), inside, steppers, strict=True):
        overlapped(each, result, stepper)
        if around is not each:
            around.__dict__.update(drain=result.drain, report=result.report)
            if (
                type(around).zero_grad is Optimizer.zero_grad
            ):  # it would read every gradient, and so wait for all updates
                around.__dict__["zero_grad"] = each.zero_grad
    return optimizer


def _inside(optimizer: Any) -> Optimizer:
    """The optimizer whose step updates: inside of what Accelerate and Fabric put around it, or `optimizer` itself."""
    wrapped = type(optimizer).__module__.startswith(WRAPPERS)
    inside = getattr(optimizer, "optimizer", None) if wrapped else None
    return _inside(inside) if isinstance(inside, Optimizer) else optimizer
