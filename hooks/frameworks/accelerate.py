"""gradwire on a model that Hugging Face's Accelerate has prepared."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from ...compress import Spec
from ...ddp_core import Handle, Scaler
from ..torch_ddp import attach, ddp_inside
from .gathered_state import GatheredState


class Accelerator(Protocol):
    """What is used of accelerate.Accelerator."""

    scaler: Scaler | None

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Have `save_state` and `load_state` call state_dict and load_state_dict of these."""
        ...


def accelerate(accelerator: Accelerator, model: nn.Module, compressor: Spec, **options: Any) -> Handle:
    """Compress the gradients of a prepared model: `handle = gradwire.accelerate(accelerator, model, "powersgd:rank=4")`.

    `options`: those of `gradwire.attach`, which this calls. What is held back follows the accelerator's loss scale, and is
    in its checkpoints: `accelerator.save_state()` gathers that of all ranks, `load_state()` scatters it, on as many ranks or
    others (see `Handle.scatter_state_dict`). All ranks call it after `accelerator.prepare`, and before `load_state`. Raises
    TypeError where Accelerate has not wrapped the model in DistributedDataParallel, as when it runs as one process.
    """
    options.setdefault("scaler", accelerator.scaler)
    if ddp_inside(model) is None:
        raise TypeError(
            f"Accelerate has not wrapped the model in DistributedDataParallel, it is {type(model).__name__}: give the one "
            f"that accelerator.prepare() returned, on several processes (torchrun --nproc-per-node 2, or accelerate launch)"
        )
    handle: Handle = attach(model, compressor, **options)
    accelerator.register_for_checkpointing(GatheredState(handle))
    return handle
