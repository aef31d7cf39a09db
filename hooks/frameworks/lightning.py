"""gradwire inside of Lightning's Trainer, of the package lightning or pytorch_lightning."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ...compress import Spec
from ...ddp_core import DistributedDataParallel, Handle, watched
from .gathered_state import scalars

PACKAGES = ("lightning", "pytorch_lightning")  # two names of the same, whose classes do not know each other
STATE = "gradwire"  # the key in a checkpoint


def _package() -> str:
    """The one that the user has imported, or else has installed."""
    found = next((name for name in PACKAGES if name in sys.modules), None)
    found = found or next((name for name in PACKAGES if find_spec(name)), None)
    if found is None:
        raise ModuleNotFoundError("Lightning is not installed: pip install 'gradwire[lightning]'")
    return "lightning.pytorch" if found == "lightning" else found


DDPStrategy: Any = import_module(f"{_package()}.strategies").DDPStrategy


class GradwireStrategy(DDPStrategy):
    """A strategy for Lightning's Trainer: `Trainer(strategy=GradwireStrategy("int4"), ...)`, on GPUs and CPUs.

    The loss scale of `precision="16-mixed"` is followed. A checkpoint holds the states of all ranks, gathered on rank
    0. A fit continues from it bit-identically, or on another number of ranks (see `Handle.scatter_state_dict`). The
    cost of steps is logged as "gradwire/...".

    Args:
        compressor: the compressor of the gradients. See `gradwire.compressor`.
        options: arguments of Lightning's DDPStrategy, of torch's DistributedDataParallel, and `transport`.

    Attributes:
        compression: the `Handle`, once a fit has begun; None before.

    Raises:
        ValueError: the compressor is unknown or has a wrong option. `fit` raises it.
    """

    strategy_name = "gradwire"
    compression: Handle | None = None
    model: Any  # Lightning's

    def __init__(self, compressor: Spec, **options: Any) -> None:
        super().__init__(**options)
        self._compressor = compressor
        self._saved: Mapping[str, Any] | None = None  # of a checkpoint that was read before the model is wrapped

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        device_ids = self.determine_ddp_device_ids()
        beside = nullcontext() if device_ids is None else torch.cuda.stream(torch.cuda.Stream())
        with beside:  # DDP is made on a stream of its own, as torch's notes on CUDA ask for
            wrapped = DistributedDataParallel(model, device_ids, compressor=self._compressor, **self._ddp_kwargs)
        self.compression = wrapped.compression
        if (scaler := getattr(self.precision_plugin, "scaler", None)) is not None:
            self.compression.follow(scaler)
        if self._saved is not None:
            self.compression.scatter_state_dict(self._saved)
            self._saved = None
        return wrapped

    @torch._disable_dynamo  # a compiled training_step may call it
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward as Lightning does. If it optimizes by hand, this prepares the backward, since forward does not."""
        by_hand = not self.lightning_module.automatic_optimization
        if isinstance(self.model, DistributedDataParallel) and by_hand and self.model.require_backward_grad_sync:
            reducer = self.model.reducer
            reducer.begin()
            closure_loss = watched(closure_loss, reducer, clone=False) if reducer.watches else closure_loss
        super().backward(closure_loss, *args, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Nothing: Lightning would prepare torch's reducer."""

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint. Lightning calls this on all ranks; weights alone are saved without the compression."""
        if self.compression is not None and "optimizer_states" in checkpoint:
            checkpoint[STATE] = self.compression.gather_state_dict()
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint. Lightning reads it on all ranks, before the model is wrapped."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        self._saved = checkpoint.get(STATE)
        return checkpoint

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Log what the last step cost, if this batch is one at whose end Lightning writes to its loggers."""
        super().on_train_batch_start(batch, batch_idx)
        if self.compression is not None and logs_now(self.lightning_module.trainer):
            self.lightning_module.log_dict(scalars(self.compression), on_step=True, on_epoch=False)

    def teardown(self) -> None:
        """Tear down as Lightning does, and end the compression, except for its state and its statistics."""
        if isinstance(self.model, DistributedDataParallel):  # Lightning would advise on static_graph, by a wrong call
            self.model = self.lightning_module
        super().teardown()
        self._saved = None  # of a checkpoint that nothing was trained from
        if self.compression is not None:
            self.compression.close()


def logs_now(trainer: Any) -> bool:
    """Return True if Lightning writes to its loggers at the end of this batch.

    No public attribute tells. Where this one is gone, every batch is logged: the same is written, but it costs more.
    """
    return bool(getattr(getattr(trainer, "_logger_connector", None), "should_update_logs", True))
