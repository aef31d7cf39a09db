"""Warnings about an optimizer that error feedback depends on: it is missing, or belongs to another model."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping

from torch import Tensor

from .build import Spec, compressor, specification
from .optimizer_defaults import Optimizers, for_adam, optimizers_of

logger = logging.getLogger(__name__)
UNKNOWN = (
    "%s keeps its default error feedback, since gradwire does not know the optimizer. With Adam or AdamW it would be %s, "
    "with another loss and memory. Pass optimizer=optimizer, or a list of several, to attach, DistributedDataParallel or "
    "gradwire.comm_hook"
)
OTHERS = (
    "optimizer= updates %d of the model's %d trainable parameters, and not %s. It decides on the error feedback of all: "
    "pass the optimizer of this model, or all of its optimizers as a list"
)


def report_optimizer(spec: Spec, optimizer: Optimizers | None, names: Mapping[Tensor, str], rank: int) -> None:
    """Log a warning on rank 0 if a compressor depends on the optimizer, and the one given is none or another model's.

    `names`: of the parameters that train. An optimizer may update copies of some in float32.
    """
    if rank != 0 or (suiting := for_adam(spec)) is None:
        return
    if optimizer is None:
        logger.warning(UNKNOWN, specification(compressor(spec)), suiting)
        return
    groups = (group for each in optimizers_of(optimizer) for group in each.param_groups)
    updated = {parameter for group in groups for parameter in group["params"]}
    missing = [name for parameter, name in names.items() if parameter not in updated]
    if missing and shapes(updated) != shapes(names):
        logger.warning(OTHERS, len(names) - len(missing), len(names), ", ".join(missing[:3]))


def shapes(parameters: Iterable[Tensor]) -> Counter[tuple[int, ...]]:
    """Return how many parameters have each shape; of shards, the shapes of this rank's parts."""
    parts: Iterable[Tensor] = (getattr(each.detach(), "to_local", each.detach)() for each in parameters)
    return Counter(tuple(part.shape) for part in parts)
