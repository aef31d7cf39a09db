"""The order in which a training sends its gradients, and whether they go on through the next forward."""

from __future__ import annotations

from typing import Literal, TypeAlias, TypeVar

from torch import nn
from torch.optim import Optimizer

from ...compress import Optimizers, optimizers_of
from ...ddp_core import DistributedDataParallel
from ...ddp_core.overlap.overlapped_optimizer import OverlappedOptimizer
from ...hooks.overlap import overlap

Order: TypeAlias = Literal["backward", "slices", "priority"]
BACKWARD: Order = "backward"
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizers)


def ordered(model: nn.Module, optimizer: AnyOptimizer, order: Order, slice_mb: float | None = None) -> AnyOptimizer:
    """The optimizer of a model whose gradients go in an order, or all of its optimizers.

    `backward`: buckets, all of which have arrived when backward ends. `slices`: the same with slices of `slice_mb` MiB of
    payload. `priority`: gradwire.overlap's. Raises ValueError for another order than backward's where the model is
    not wrapped in gradwire's DistributedDataParallel.
    """
    if order == BACKWARD:
        return optimizer
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(f"order {order} needs gradwire's DistributedDataParallel, got {type(model).__name__}")
    how = "synchronous" if order == "slices" else order
    return overlap(model, optimizer, order=how, slice_mb=slice_mb, per_parameter=True)


def drain(optimizer: Optimizers) -> None:
    """Wait for all updates that are under way."""
    for each in optimizers_of(optimizer):
        if isinstance(each, OverlappedOptimizer):
            each.drain()


def waited_seconds(optimizer: Optimizer) -> float:
    """Return the seconds that the last forward waited for the step before it; 0 on a GPU, whose host does not wait."""
    on_gpu = any(parameter.is_cuda for group in optimizer.param_groups for parameter in group["params"])
    if on_gpu or not isinstance(optimizer, OverlappedOptimizer):
        return 0.0
    return optimizer.report().exposed or 0.0
