"""gradwire on a model that Hugging Face's Accelerate has prepared."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...compress import Spec
from ...ddp_core import Handle
from ..handle_of import handle_of
from ..local_sgd.local_steps import LocalSteps
from ..model_kinds import ddp_inside
from ..torch_ddp import attach
from .gathered_state import GatheredState
from .local_steps import GatheredSites, without_averages

if TYPE_CHECKING:
    from accelerate import Accelerator

CLOSED = "closed"  # the key of a state that was saved when its handle was closed
log = logging.getLogger(__name__)


class PreparedState(GatheredState):
    """The compression of a prepared model in Accelerate's checkpoints, as long as the accelerator has the model.

    Accelerate loads no checkpoint of fewer objects than it has. So a closed handle keeps its place, without a state.
    """

    def __init__(self, handle: Handle | GatheredSites, model: DistributedDataParallel) -> None:
        super().__init__(handle)
        self._model = weakref.ref(model)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks, or that the handle is closed."""
        return {CLOSED: True} if self._ended else super().state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from the states of all ranks. A closed handle takes none."""
        if self._ended:
            return
        if CLOSED in saved and isinstance(self._handle, Handle):
            log.warning("the checkpoint has no state of the compression, which was closed: residuals stay as they are")
        else:
            super().load_state_dict(saved)

    @property
    def _ended(self) -> bool:
        """True if it is of a closed handle. Local SGD that has ended still has a state."""
        return isinstance(self._handle, Handle) and self._handle.closed

    def is_of(self, models: Sequence[nn.Module]) -> bool:
        """Return True if its model is one of these, or inside one, or around one, and the handle is not closed."""
        model = None if self._handle.closed else self._model()
        return model is not None and any(each is model.module or ddp_inside(each) is model for each in models)


def accelerate(accelerator: Accelerator, model: nn.Module, compressor: Spec | None = None, **options: Any) -> Handle:
    """Compress the gradients of a prepared model: `handle = gradwire.accelerate(accelerator, model, "int4")`.

    All ranks call it after `accelerator.prepare` and before `load_state`. Residuals follow the accelerator's loss
    scale and are in its checkpoints: `save_state()` gathers those of all ranks, `load_state()` scatters them, on the
    same or another number of ranks. Before an accelerator prepares the model of another fold, call
    `accelerator.free_memory()` or `handle.close()`: its checkpoints then leave out the compression of the earlier
    model.

    Args:
        accelerator: the accelerate.Accelerator.
        model: the model that `prepare` returned.
        compressor: the compressor of the gradients. See `gradwire.compressor`. None if the model has a hook of
            `gradwire.AccelerateKwargs`.
        options: other arguments of `gradwire.attach`. By default `optimizer` is what `prepare` returned for this model.

    Returns:
        The handle.

    Raises:
        TypeError: Accelerate has not wrapped the model in DistributedDataParallel, for example in a run of one
            process.
    """
    options.setdefault("scaler", accelerator.scaler)
    ddp = _wrapped(accelerator, model)
    if compressor is not None:
        options.setdefault("optimizer", _optimizers_of(accelerator, ddp) or None)
        handle: Handle = attach(model, compressor, **options)
    else:
        handle = handle_of(ddp)
        if options["scaler"] is not None:
            handle.follow(options["scaler"])
    _save(accelerator, PreparedState(handle, ddp))
    return handle


def accelerate_locally(accelerator: Accelerator, model: nn.Module, optimizer: Any, **options: Any) -> LocalSteps:
    """Train a prepared model by local SGD: `local = gradwire.accelerate_locally(accelerator, model, optimizer, every=64)`.

    All ranks call it after `accelerator.prepare`. Models are averaged, gradients are not. `save_state()` saves the states
    of all ranks and the model of the first one; `load_state()` continues from the model after the last round.

    Args:
        accelerator: the accelerate.Accelerator.
        model: the model that `prepare` returned.
        optimizer: the optimizer that `prepare` returned, or a list.
        options: other arguments of `gradwire.LocalSteps`.

    Returns:
        The `LocalSteps`.

    Raises:
        TypeError: Accelerate has not wrapped the model in DistributedDataParallel.
    """
    ddp = _wrapped(accelerator, model)
    inside = without_averages(ddp)
    local = LocalSteps(inside, optimizer, **options)
    _save(accelerator, PreparedState(GatheredSites(local, inside), ddp))
    return local


def _optimizers_of(accelerator: Accelerator, model: nn.Module) -> list[Optimizer]:
    """Return the prepared optimizers of a model. No public attribute lists them."""
    own = set(model.parameters())
    prepared: list[Optimizer] = getattr(accelerator, "_optimizers", [])
    return [each for each in prepared if any(not own.isdisjoint(group["params"]) for group in each.param_groups)]


def _wrapped(accelerator: Accelerator, model: nn.Module) -> DistributedDataParallel:
    """Return the DDP model that an accelerator has prepared. Raises TypeError where it has wrapped none."""
    if (ddp := ddp_inside(model)) is not None:
        return ddp
    if accelerator.num_processes == 1:
        raise TypeError(
            "Accelerate runs as one process here, and has no gradients to average. Start several processes: torchrun "
            "--nproc-per-node 2 script.py, or, on GPUs, accelerate launch --multi_gpu script.py (accelerate launch --cpu "
            "starts one process, whatever its --num_processes is)"
        )
    raise TypeError(
        f"Accelerate has not wrapped the model in DistributedDataParallel, it is {type(model).__name__}: pass the model "
        "that accelerator.prepare() returned"
    )


def _save(accelerator: Accelerator, state: PreparedState) -> None:
    """Have the checkpoints hold a state, and leave out models that `free_memory()` has released, and closed handles.

    They would be kept alive, too. No public attribute lists what is registered. Where these are gone, all stays registered.
    """
    registered, models = getattr(accelerator, "_custom_objects", []), getattr(accelerator, "_models", None)
    if models is not None:
        registered[:] = [each for each in registered if not isinstance(each, PreparedState) or each.is_of(models)]
    accelerator.register_for_checkpointing(state)
