"""gradwire inside of Lightning's Trainer and of Fabric."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...compress import Spec
from ...ddp_core import DistributedDataParallel, Handle, Scaler, over, share_model, watched
from ..local_sgd.local_steps import LocalSteps
from .gathered_state import scalars
from .lightning_package import NAMED, DDPStrategy, FabricDDPStrategy
from .local_steps import OF_LOCAL_STEPS, GatheredSites

STATE = "gradwire"  # the key in a checkpoint
NAMES = ("bf16", "int8", "int4")  # compressors of the strategies that Trainer and Fabric know by name
BARE_BACKWARD = (
    "an optimizer makes a step with gradients that were not averaged over ranks: the training step calls loss.backward(). "
    "Call self.manual_backward(loss) instead, or the ranks' models drift apart"
)
IN_OTHER_PROCESSES = (
    "the handle was in the processes that the strategy started (start_method={!r}), and ended with them: look at "
    "trainer.logged_metrics, or use start_method='popen', which also trains in this process"
)


class _Kept(DDPStrategy):
    """A strategy with a state of its own, which is in Lightning's checkpoints, and with costs, which are logged.

    `_source`: the owner of the state; None before a fit. `_saved`: the state of a checkpoint that was read before that.
    """

    model: Any  # Lightning's
    _source: Handle | GatheredSites | None = None
    _saved: Mapping[str, Any] | None = None

    def _load_saved(self) -> None:
        if self._saved is not None and self._source is not None:
            self._source.scatter_state_dict(self._saved)
            self._saved = None

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers as Lightning does, of the same model on all ranks: some copy its weights."""
        assert dist.group.WORLD is not None
        if self._ddp_kwargs.get("init_sync", True):
            share_model(self.lightning_module, over(dist.group.WORLD, self.root_device))
        super().setup_optimizers(trainer)

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint. Lightning calls this on all ranks; weights alone are saved without the state of all ranks."""
        if self._source is not None and "optimizer_states" in checkpoint:
            checkpoint[STATE] = self._source.gather_state_dict()
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint. Lightning reads it on all ranks, before the fit begins."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        self._saved = checkpoint.get(STATE)
        return checkpoint

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Log what the last step or round cost, if this batch is one at whose end Lightning writes to its loggers."""
        super().on_train_batch_start(batch, batch_idx)
        if self._source is not None and logs_now(self.lightning_module.trainer):
            self.lightning_module.log_dict(scalars(self._source), on_step=True, on_epoch=False)

    def teardown(self) -> None:
        """Tear down as Lightning does."""
        super().teardown()
        self._saved = None  # of a checkpoint that nothing was trained from


class _Compressing:
    """A strategy whose gradients are compressed, in gradwire's DistributedDataParallel."""

    _ddp_kwargs: dict[str, Any]  # Lightning's

    def __init__(self, compressor: Spec, **options: Any) -> None:
        super().__init__(**options)
        self._compressor = compressor

    def _wrapped(
        self,
        model: nn.Module,
        device_ids: list[int] | None,
        optimizers: Sequence[Optimizer],
        scaler: Scaler | None = None,
    ) -> DistributedDataParallel:
        beside = nullcontext() if device_ids is None else torch.cuda.stream(torch.cuda.Stream())
        with beside:  # DDP is made on a stream of its own, as torch's notes on CUDA ask for
            settings = {"compressor": self._compressor, "scaler": scaler, "optimizer": optimizers or None}
            return DistributedDataParallel(model, device_ids, **{**settings, **self._ddp_kwargs})


class GradwireStrategy(_Compressing, _Kept):
    """A strategy for Lightning's Trainer: `Trainer(strategy=GradwireStrategy("int4"), ...)`, on GPUs and CPUs.

    The loss scale of `precision="16-mixed"` is followed. A checkpoint holds the states of all ranks, gathered on rank
    0. A fit continues from it bit-identically, or on another number of ranks (see `Handle.scatter_state_dict`). The
    cost of steps is logged as "gradwire/...".

    `Trainer(strategy="gradwire_int4")` is the same by name, also with bf16 and int8, once gradwire.lightning is
    imported. For Ray: `class Strategy(GradwireStrategy, RayDDPStrategy): pass`.

    Args:
        compressor: the compressor of the gradients. See `gradwire.compressor`.
        options: arguments of Lightning's DDPStrategy, of torch's DistributedDataParallel, and `transport`.

    Attributes:
        compression: the `Handle`, once a fit has begun; None before.

    Raises:
        ValueError: the compressor is unknown or has a wrong option. `fit` raises it.
    """

    strategy_name = "gradwire"
    _source: Handle | None = None
    _steps_before: dict[int, int]  # synchronized steps at an optimizer's last step, by its identity
    _has_optimizers = False  # True between a model's wrapping and the place where Lightning makes the optimizers

    @property
    def compression(self) -> Handle | None:
        """The handle; None before a fit. Raises RuntimeError where the fit was in other processes."""
        elsewhere = self._start_method != "popen" and self.lightning_module is not None
        if self._source is None and elsewhere:
            raise RuntimeError(IN_OTHER_PROCESSES.format(self._start_method))
        return self._source

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers as Lightning does, unless they were made before the model was wrapped."""
        if not self._has_optimizers:
            super().setup_optimizers(trainer)
        self._has_optimizers = False

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        super().setup_optimizers(self.lightning_module.trainer)  # the compressor depends on them
        self._has_optimizers = True
        wrapped = self._wrapped(model, self.determine_ddp_device_ids(), self.optimizers)
        self._source = handle = wrapped.compression
        self._steps_before = {}
        if (scaler := getattr(self.precision_plugin, "scaler", None)) is not None:
            handle.follow(scaler)
        self._load_saved()
        return wrapped

    @torch._disable_dynamo  # a compiled training_step may call it
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward as Lightning does. If it optimizes by hand, this prepares the backward, since forward does not."""
        by_hand = not self.lightning_module.automatic_optimization
        if isinstance(self.model, DistributedDataParallel) and by_hand and self.model.require_backward_grad_sync:
            reducer = self.model.reducer
            reducer.expect_backward()
            closure_loss = watched(closure_loss, reducer, clone=False) if reducer.watches else closure_loss
        super().backward(closure_loss, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a step as Lightning does. Optimizing by hand, warn once of gradients that no backward has averaged."""
        if isinstance(self.model, DistributedDataParallel) and not self.lightning_module.automatic_optimization:
            self._look_for_bare_backward(optimizer)
        return super().optimizer_step(optimizer, *args, **kwargs)

    def _look_for_bare_backward(self, optimizer: Any) -> None:
        begun, key = self.model.compression.averager.steps_begun, id(optimizer)
        parameters = (each for group in optimizer.param_groups for each in group["params"])
        if self._steps_before.get(key, 0) == begun and any(each.grad is not None for each in parameters):
            if -1 not in self._steps_before:
                warnings.warn(BARE_BACKWARD, stacklevel=2)
            self._steps_before[-1] = begun  # warned
        self._steps_before[key] = begun

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Nothing: Lightning would prepare torch's reducer."""

    def teardown(self) -> None:
        """Tear down as Lightning does, and end the compression, except for its state and its statistics."""
        if isinstance(self.model, DistributedDataParallel):  # Lightning would advise on static_graph, by a wrong call
            self.model = self.lightning_module
        super().teardown()
        if self._source is not None:
            self._source.close()


class LocalStepsStrategy(_Kept):
    """Local SGD: `Trainer(strategy=LocalStepsStrategy(every=64, compressor="int4"), ...)`, on GPUs and CPUs.

    Models are averaged, gradients are not. A fit that ends averages the model. A checkpoint holds the states of all ranks
    and the model of rank 0. A fit from it continues from the model after the last round.

    Args:
        options: arguments of `gradwire.LocalSteps`, and of Lightning's DDPStrategy.

    Attributes:
        local: the `LocalSteps`, once a fit has begun; None before.

    Raises:
        ValueError: LocalSteps refuses an option. `fit` raises it.
    """

    strategy_name = "gradwire_local_steps"
    local: LocalSteps | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**{name: each for name, each in options.items() if name not in OF_LOCAL_STEPS})
        self._options = {name: each for name, each in options.items() if name in OF_LOCAL_STEPS}

    def configure_ddp(self) -> None:
        """Wrap nothing: no gradients are averaged."""

    def setup(self, trainer: Any) -> None:
        """Set up as Lightning does, and begin to average models if this is a fit."""
        super().setup(trainer)
        if not trainer.training:
            return
        self.local = LocalSteps(self.lightning_module, self.optimizers, **self._options)
        self._source = GatheredSites(self.local, self.lightning_module)
        self._load_saved()

    def on_train_end(self) -> None:
        """Average the model, which is then the same on all ranks, and end local SGD."""
        super().on_train_end()
        if self.local is not None:
            self.local.finish()

    def teardown(self) -> None:
        """Tear down as Lightning does, and end local SGD."""
        super().teardown()
        if self.local is not None:
            self.local.close()


def logs_now(trainer: Any) -> bool:
    """Return True if Lightning writes to its loggers at the end of this batch.

    No public attribute tells. Where this one is gone, every batch is logged: the same is written, but it costs more.
    """
    return bool(getattr(getattr(trainer, "_logger_connector", None), "should_update_logs", True))


class GradwireFabricStrategy(_Compressing, FabricDDPStrategy):
    """gradwire's DistributedDataParallel in Fabric: `Fabric(strategy=GradwireFabricStrategy("int4"), ...)`.

    The handle of a model that `fabric.setup` returned is `gradwire.handle_of(model)`. To save its state, add
    `{"compression": gradwire.GatheredState(handle)}` to the state of `fabric.save`. Residuals follow the loss scale of
    `precision="16-mixed"`. `Fabric(strategy="gradwire_int4")` is the same by name.

    Args:
        compressor: the compressor of the gradients. See `gradwire.compressor`.
        options: arguments of Fabric's DDPStrategy, of torch's DistributedDataParallel, and `transport`.

    Raises:
        ValueError: the compressor is unknown or has a wrong option. `fabric.setup` raises it.
    """

    _optimizers: Sequence[Optimizer] = ()  # of the model that is set up now

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], *scheduler: Any) -> Any:
        """Set up a model and its optimizers as Fabric does; the compressor depends on them."""
        self._optimizers = optimizers
        try:
            return super().setup_module_and_optimizers(module, optimizers, *scheduler)
        finally:
            self._optimizers = ()

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap a model as Fabric does, in gradwire's DistributedDataParallel."""
        scaler = getattr(self.precision, "scaler", None)
        return self._wrapped(module, self._determine_ddp_device_ids(), self._optimizers, scaler)


for _name in NAMES:
    for _strategies, _class in zip(NAMED, (GradwireStrategy, GradwireFabricStrategy), strict=True):
        _described = f"gradwire's DistributedDataParallel with {_name}"
        _strategies.register(f"gradwire_{_name}", _class, _described, override=True, compressor=_name)
