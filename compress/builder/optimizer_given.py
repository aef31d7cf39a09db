"""Warnings about an optimizer that belongs to another model, or is missing where error feedback depends on it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping

import torch
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
NONE_OF = (
    "optimizer= updates none of the model's %d trainable parameters, so the model would not train: pass the optimizer of "
    "this model. fully_shard replaces parameters, so make optimizers after it"
)


def report_optimizer(optimizer: Optimizers | None, names: Mapping[Tensor, str], *specs: Spec) -> None:
    """Log a warning if the optimizer given is another model's, or if it is none and a compressor depends on it.

    `names`: of the parameters that train. An optimizer may update copies of some, in another dtype or elsewhere.
    """
    suiting = {
        specification(compressor(spec)): with_adam for spec in specs if (with_adam := for_adam(spec)) is not None
    }
    if optimizer is None:
        for spec, with_adam in suiting.items():
            logger.warning(UNKNOWN, spec, with_adam)
        return
    groups = (group for each in optimizers_of(optimizer) for group in each.param_groups)
    updated = {parameter for group in groups for parameter in group["params"]}
    missing = [name for parameter, name in names.items() if parameter not in updated]
    copies = shapes(updated) == shapes(names) and places(updated) != places(names)
    if names and len(missing) == len(names) and not copies:
        logger.warning(NONE_OF, len(names))
    elif missing and suiting and not copies:
        logger.warning(OTHERS, len(names) - len(missing), len(names), ", ".join(missing[:3]))


def places(parameters: Iterable[Tensor]) -> set[tuple[torch.dtype, torch.device]]:
    """Return the dtypes and devices of parameters."""
    return {(each.dtype, each.device) for each in parameters}


def shapes(parameters: Iterable[Tensor]) -> Counter[tuple[int, ...]]:
    """Return how many parameters have each shape; of shards, the shapes of this rank's parts."""
    parts: Iterable[Tensor] = (getattr(each.detach(), "to_local", each.detach)() for each in parameters)
    return Counter(tuple(part.shape) for part in parts)
