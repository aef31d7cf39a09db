"""gradwire inside of Hugging Face's Trainer."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...compress import Spec
from ...ddp_core import Handle, exchange, over
from ..local_sgd.local_steps import LocalSteps
from ..model_kinds import ddp_inside, is_sharded
from ..torch_ddp import attach
from .gathered_state import scalars
from .local_steps import GatheredSites, without_averages

FILE = "gradwire.pt"  # in the folder of a checkpoint, with the states of all ranks
OF_RANK = (
    "gradwire-rank-{}-of-{}.pt"  # in the folder of a checkpoint that was saved on SIGTERM, with a rank's own state
)
LOST = (
    "training continues from step %d, and the old residuals are lost: there is no %s. If you resume from another "
    "folder, pass GradwireCallback(..., resume_from_checkpoint=...)"
)
NOT_WRAPPED = (
    "the Trainer has not wrapped the model, so every rank would train alone, without gradwire, too. Accelerate marks a "
    "model as prepared when evaluate() or predict() runs before train(), and does not wrap it afterwards. Pass "
    "eval_on_start=True to TrainingArguments instead of calling evaluate() before train(), or say "
    "trainer.model._is_accelerate_prepared = False between the two"
)
log = logging.getLogger(__name__)


class CheckpointedCallback(TrainerCallback):
    """A callback with a state on each rank, of which the Trainer's checkpoints have a file."""

    def __init__(self, trainer: Any, resume_from_checkpoint: str | Path | None) -> None:
        self._trainer, self._resumed = trainer, resume_from_checkpoint
        self._state: Handle | GatheredSites | None = None

    def _wrapped(self, args: Any) -> DistributedDataParallel | None:
        """Return what the Trainer has wrapped the model in; None where it runs as one process, which a warning says."""
        model = self._trainer.model_wrapped
        found = ddp_inside(model)
        if found is None and args.world_size == 1:
            log.warning("the Trainer runs as one process: there is nothing to send, and nothing is compressed")
        elif found is None and getattr(model, "_is_accelerate_prepared", False) and not is_sharded(model):
            raise RuntimeError(NOT_WRAPPED)
        return found

    def _resume(self, args: Any, state: Any) -> None:
        """Go on from a checkpoint's file, which rank 0 alone needs to see, or from the files of all ranks."""
        folder = Path(self._resumed or folder_of(args, state))
        path, mine = folder / FILE, folder / OF_RANK.format(args.process_index, args.world_size)
        assert dist.group.WORLD is not None
        assert self._state is not None
        everyone = over(dist.group.WORLD, args.device)
        found = exchange(f"{path.exists()} {mine.exists()}", everyone, what="whether there is a checkpoint")
        if found[0].startswith("True"):
            saved = torch.load(path, map_location="cpu", weights_only=True) if dist.get_rank() == 0 else {}
            self._state.scatter_state_dict(saved)
        elif isinstance(self._state, Handle) and all(each.endswith("True") for each in found):
            self._state.load_state_dict(torch.load(mine, map_location="cpu", weights_only=True))
        else:
            log.warning(LOST, state.global_step, path)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Add the states of all ranks to the checkpoint; unless it is of weights alone."""
        if self._state is None or args.save_only_model:
            return
        saved = self._state.gather_state_dict()
        folder = folder_of(args, state)
        if saved and folder.is_dir():
            write(saved, folder / FILE)
        elif saved:
            log.warning("the compression's state is not saved: this Trainer's checkpoint is not %s", folder)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """Log what a step or a round costs whenever the loss is logged."""
        if self._state is not None and "loss" in (logs or {}):
            self._trainer.log(scalars(self._state))


class GradwireCallback(CheckpointedCallback):
    """A callback for Hugging Face's Trainer: `trainer.add_callback(GradwireCallback(trainer, "int4"))`.

    Residuals follow the Trainer's loss scale, and one file in its checkpoints holds those of all ranks. Training
    continues from it bit-identically, or on another number of ranks (see `Handle.scatter_state_dict`). The cost of
    steps is logged with the loss, as "gradwire/...". A Trainer that runs as one process trains without compression.

    With `enable_jit_checkpoint=True`, each rank adds a file of its own on SIGTERM; continuing from these takes the same
    number of ranks.

    Args:
        trainer: the transformers.Trainer.
        compressor: the compressor of the gradients. See `gradwire.compressor`.
        resume_from_checkpoint: the checkpoint, if it does not lie in `output_dir`. The Trainer does not pass its own
            argument on to callbacks.
        options: other arguments of `gradwire.attach`. By default `optimizer` is the Trainer's.

    Attributes:
        compression: the `Handle`, once training has begun; None before.
    """

    def __init__(
        self, trainer: Any, compressor: Spec, *, resume_from_checkpoint: str | Path | None = None, **options: Any
    ) -> None:
        super().__init__(trainer, resume_from_checkpoint)
        self._compressor, self._options = compressor, options
        self._ddp: nn.Module | None = None
        self.compression: Handle | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Attach to the model that the Trainer has wrapped by now; callbacks are given the one inside."""
        ddp = self._wrapped(args)
        if ddp is None and args.world_size == 1:
            return
        if self.compression is None or ddp is not self._ddp:  # a second train() goes on with the same one
            options = {"scaler": self._trainer.accelerator.scaler, "optimizer": optimizer, **self._options}
            self._state = self.compression = attach(self._trainer.model_wrapped, self._compressor, **options)
            self._ddp = ddp
        for each in self._trainer.callback_handler.callbacks:
            if (manager := getattr(each, "jit_manager", None)) is not None:
                manager.execute_jit_checkpoint = partial(self._on_sigterm, manager.execute_jit_checkpoint, args, state)
        if state.global_step:
            self._resume(args, state)

    def _on_sigterm(self, save: Callable[[], None], args: Any, state: Any) -> None:
        """Add this rank's state to a checkpoint that the Trainer saves on SIGTERM, without a word to other ranks."""
        if self.compression is not None and not args.save_only_model:
            folder = folder_of(args, state)
            folder.mkdir(parents=True, exist_ok=True)
            write(self.compression.state_dict(), folder / OF_RANK.format(args.process_index, args.world_size))
        save()


class LocalStepsCallback(CheckpointedCallback):
    """Local SGD: `trainer.add_callback(LocalStepsCallback(trainer, every=64, compressor="int4"))`.

    Models are averaged, gradients are not. A training that ends averages the model, unless the Trainer has loaded the best
    one. A checkpoint holds the states of all ranks and the model of rank 0. Training continues from the model after the
    last round.

    Args:
        trainer: the transformers.Trainer.
        resume_from_checkpoint: the checkpoint, if it does not lie in `output_dir`.
        options: arguments of `gradwire.LocalSteps`.

    Attributes:
        local: the `LocalSteps`, while training runs; None before and after.
    """

    def __init__(self, trainer: Any, *, resume_from_checkpoint: str | Path | None = None, **options: Any) -> None:
        super().__init__(trainer, resume_from_checkpoint)
        self._options = options
        self.local: LocalSteps | None = None
        train = trainer.train

        @wraps(train)
        def train_and_close(*arguments: Any, **named: Any) -> Any:
            try:
                return train(*arguments, **named)
            except BaseException:
                self._close()  # no event of callbacks says that training broke off
                raise

        trainer.train = train_and_close

    def _close(self) -> None:
        if self.local is not None:
            self.local.abandon()
            self._state = self.local = None

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Begin to average models, of the optimizer that the Trainer has made by now."""
        self._close()  # the Trainer may begin anew, with smaller batches
        ddp = self._wrapped(args)
        if ddp is None:
            return
        model = without_averages(ddp)
        self.local = LocalSteps(model, optimizer, **self._options)
        self._state = GatheredSites(self.local, model)
        if state.global_step:
            self._resume(args, state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Average the model, which is then the same on all ranks, unless all have loaded the best one of the training."""
        if self.local is not None:
            best = args.load_best_model_at_end and state.best_model_checkpoint is not None
            self.local.close() if best else self.local.finish()
            self._close()


def write(saved: Mapping[str, Any], path: Path) -> None:
    """Save a state in a file that is there when all of it is."""
    unfinished = path.with_name(f"{path.name}.part")
    torch.save(saved, unfinished)
    os.replace(unfinished, path)


def folder_of(args: Any, state: Any) -> Path:
    """Return the folder of this step's checkpoint."""
    return Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
