"""gradwire inside of Hugging Face's Trainer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...compress import Spec
from ...ddp_core import Handle, exchange
from ..torch_ddp import attach, ddp_inside, is_sharded
from .gathered_state import scalars

FILE = "gradwire.pt"  # in the folder of a checkpoint
NOT_WRAPPED = (
    "the Trainer has not wrapped the model, so every rank would train alone, without gradwire, too. Accelerate marks a "
    "model as prepared when evaluate() or predict() runs before train(), and does not wrap it afterwards. Pass "
    "eval_on_start=True to TrainingArguments instead of calling evaluate() before train(), or say "
    "trainer.model._is_accelerate_prepared = False between the two"
)
log = logging.getLogger(__name__)


class GradwireCallback(TrainerCallback):
    """A callback for Hugging Face's Trainer: `trainer.add_callback(GradwireCallback(trainer, "int4"))`.

    Residuals follow the Trainer's loss scale, and one file in its checkpoints holds those of all ranks. Training
    continues from it bit-identically, or on another number of ranks (see `Handle.scatter_state_dict`). The cost of
    steps is logged with the loss, as "gradwire/...". A Trainer that runs as one process trains without compression.

    Args:
        trainer: the transformers.Trainer.
        compressor: the compressor of the gradients. See `gradwire.compressor`.
        resume_from_checkpoint: the checkpoint, if it does not lie in `output_dir`. The Trainer does not pass its own
            argument on to callbacks.
        options: other arguments of `gradwire.attach`.

    Attributes:
        compression: the `Handle`, once training has begun; None before.
    """

    def __init__(
        self, trainer: Any, compressor: Spec, *, resume_from_checkpoint: str | Path | None = None, **options: Any
    ) -> None:
        self._trainer, self._compressor, self._options = trainer, compressor, options
        self._resumed = resume_from_checkpoint
        self._wrapped: DistributedDataParallel | None = None
        self.compression: Handle | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Attach to the model that the Trainer has wrapped by now; callbacks are given the one inside."""
        model = self._trainer.model_wrapped
        wrapped = ddp_inside(model)
        if wrapped is None and args.world_size == 1:
            log.warning("the Trainer runs as one process: there is nothing to send, and nothing is compressed")
            return
        if wrapped is None and getattr(model, "_is_accelerate_prepared", False) and not is_sharded(model):
            raise RuntimeError(NOT_WRAPPED)
        if self.compression is None or wrapped is not self._wrapped:  # a second train() goes on with the same one
            options = {"scaler": self._trainer.accelerator.scaler, **self._options}
            self.compression = attach(model, self._compressor, **options)
            self._wrapped = wrapped
        if state.global_step:
            self._resume(self.compression, Path(self._resumed or folder_of(args, state), FILE), state.global_step)

    def _resume(self, handle: Handle, path: Path, step: int) -> None:
        """Go on from a checkpoint's file, which rank 0 alone needs to see."""
        group = handle.averager.engines.group
        if exchange(str(path.exists()), group, what="whether there is a checkpoint")[0] != "True":
            log.warning(
                "training goes on from step %d, and what was held back before is lost: there is no %s. Where the checkpoint "
                "is another one, say GradwireCallback(..., resume_from_checkpoint=...)",
                step,
                path,
            )
            return
        saved = torch.load(path, map_location="cpu", weights_only=True) if group.rank() == 0 else {}
        handle.scatter_state_dict(saved)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Add what is held back to the checkpoint; unless it is of weights alone."""
        if self.compression is None or args.save_only_model:
            return
        saved = self.compression.gather_state_dict()
        folder = folder_of(args, state)
        if saved and folder.is_dir():
            unfinished = folder / f"{FILE}.part"
            torch.save(saved, unfinished)
            unfinished.replace(folder / FILE)  # the file is there when all of the checkpoint is
        elif saved:
            log.warning("what is held back is not saved: this Trainer's checkpoint is not %s", folder)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """Log what a step costs whenever the loss is logged."""
        if self.compression is not None and "loss" in (logs or {}):
            self._trainer.log(scalars(self.compression))


def folder_of(args: Any, state: Any) -> Path:
    """Return the folder of this step's checkpoint."""
    return Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
