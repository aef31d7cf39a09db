"""`gradwire.overlap`: communication that goes on while the next forward runs."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from ..compress import Optimizers, optimizers_of
from ..ddp_core.module import DistributedDataParallel
from ..ddp_core.overlap import error_messages
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
    order: str = "priority",
    slice_mb: float | None = None,
    per_parameter: bool = False,
) -> AnyOptimizer:
    """Overlap the averages of a step with the next forward: `optimizer = gradwire.overlap(model, optimizer)`.

    Each average arrives before its first use. All ranks call it. The training loop stays as it is. Results are
    bit-identical to those of `order="synchronous"`.

    Args:
        model: a model wrapped in `gradwire.DistributedDataParallel`.
        optimizer: the optimizer of the model, or a list, such as Muon for matrices and AdamW for the rest.
        order: "priority" overlaps and sends first what the next forward needs first, in an order that is planned from
            measured times. "synchronous" does not overlap.
        slice_mb: MiB that are sent at once; by default 2, or an eighth of the model if that is less. Large parameters
            are cut into slices, except with compressors whose state is more than a residual.
        per_parameter: True promises that an optimizer that is not torch's updates each parameter from its own
            gradient and state alone.

    Returns:
        The same optimizer or list. Each optimizer has two more methods: `drain()` waits for everything on its way,
        `report()` returns the waits of the last step.

    Raises:
        TypeError: the model or the optimizer is of a kind that cannot overlap.
        ValueError: an argument is out of range.
        RuntimeError: the model or the optimizer overlaps already, or a communication hook averages.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(error_messages.not_ours(model))
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
            if type(around).zero_grad is Optimizer.zero_grad:  # it would read every gradient, and wait for all updates
                around.__dict__["zero_grad"] = each.zero_grad
    return optimizer


def _inside(optimizer: Any) -> Optimizer:
    """The optimizer whose step updates: inside of what Accelerate and Fabric put around it, or `optimizer` itself."""
    wrapped = type(optimizer).__module__.startswith(WRAPPERS)
    inside = getattr(optimizer, "optimizer", None) if wrapped else None
    return _inside(inside) if isinstance(inside, Optimizer) else optimizer
