"""One rank's compression of one model: what a communication hook calls, and what the user holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..compress import Compressor, Optimizers, Spec, compressor, specification, tuned
from .averaging.averager import CompressedAverager
from .averaging.torch_steps import TorchSteps
from .buckets.layout import plain_names
from .engine.engine import DEFAULT_TIMEOUT
from .measure.metrics import metrics
from .measure.stats import Stats
from .memory import checkpoint
from .memory.loss_scale import LossScale, Scaler
from .memory.model_memory import Snapshot
from .memory.resize import merged
from .transport.collectives import gathered, scattered
from .transport.presence import await_all
from .transport.protocol import Decorator

if TYPE_CHECKING:
    from ..hooks.watching.watch import Watch
    from .averaging.shard_averager import ShardAverager

UNBOUND = "a state of another number of ranks needs the model's parameters: call handle.bind(model) first"


class Observed:
    """A handle, as far as it tells what its steps cost. `averager`: what it is the handle of."""

    averager: CompressedAverager | ShardAverager
    _loss_scale: LossScale | None = None

    def _what(self) -> str:
        """Return a name of what is sent."""
        raise NotImplementedError

    def stats(self) -> Stats:
        """Rounds, bytes and seconds of the last synced step, by bucket, and in total."""
        return self.averager.stats()

    def metrics(self) -> dict[str, float]:
        """The same and more as flat names and numbers, for `wandb.log(handle.metrics())`: see docs/watch.md.

        Of the last synced step; steps, and bytes in total, since the beginning. Never waits for a GPU.
        """
        return metrics(self.averager.measured())

    def watch(self, every: int = 100, to: Any = "console", *, folder: str | Path | None = None) -> Watch:
        """Tell what a step costs, after every `every` steps, until what it returns, or the handle, is closed.

        `to`: "console", a rich Console or a logging.Logger, for a line of text; a run of wandb or a SummaryWriter of
        TensorBoard, for numbers; or any callable of (metrics, step), which must not communicate. On rank 0 only. `folder`:
        where rank 0 keeps a file of each rank for `gradwire top`; all ranks give it. Figures are means over the last 8
        steps. No bit of the training changes. Raises ValueError and TypeError for arguments that tell nobody.
        """
        from ..hooks.watching.watch import watch  # what reports needs trackers, folders and a model of a step

        return watch(self, every, to, folder)

    def rescale(self, factor: float) -> None:
        """Multiply what is held back, when the loss scale has changed: it was scaled with the old one.

        After `scaler.update()`: `if (new := scaler.get_scale()) != old: handle.rescale(new / old)`. Raises ValueError for a
        factor that is not finite or not above 0, and RuntimeError between loading a state and the next backward, or where
        the handle follows a scaler.
        """
        if self._loss_scale is not None:
            raise RuntimeError("the handle follows a scaler by itself: leave rescale() out, or the scaler of attach()")
        if not 0 < factor < math.inf:
            raise ValueError(f"the factor is the new loss scale over the old one, above 0 and finite; got {factor}")
        self.averager.between_steps(lambda: self._rescale(factor))

    def _rescale(self, factor: float) -> None:
        self.averager.memory.rescale(factor)

    def _follow(self, scaler: Scaler, averager: CompressedAverager | ShardAverager) -> None:
        """Follow the scale of a scaler before each step of an averager."""
        self._loss_scale = LossScale(scaler, self._rescale)
        averager.before_step = self._loss_scale.follow

    def discard_step(self) -> None:
        """Forget the gradients of the last synced backward, which you throw away: they come back in no later average.

        On all ranks, before the next backward, a swap, a rescaling or a load. The step still counts, as one that has
        overflowed does. Raises RuntimeError where there is no such step.
        """
        self.averager.between_steps(self._discard)

    def _discard(self) -> None:
        self.averager.memory.discard_step()

    def __repr__(self) -> str:
        name, what = type(self).__name__, self._what()
        try:
            ranks = self.averager.engines.ranks
        except RuntimeError:
            return f"<{name}: {what}, no process group yet>"
        measured = self.averager.measured()
        numbers = metrics(measured)
        parts = [what, f"rank {ranks.rank} of {ranks.world_size}"]
        parts += [f"{numbers['steps']} steps, {numbers['steps_here']} of them here"]
        parts += [f"{numbers['ratio']:.4g}x fewer bytes"] if "ratio" in numbers else []
        parts += [] if measured.warm_up is None else [str(measured.warm_up)]
        return f"<{name}: {', '.join(parts)}>"


class Handle(Observed):
    """The compression of a model's gradients on this rank.

    Made by `gradwire.attach` or `gradwire.comm_hook`. All ranks make one, with the same compressor, and call `swap` and
    `load_state_dict` at the same step. `partial`: backwards may leave parameters out (DDP's find_unused_parameters).
    `transport`: what to put around each transport, such as an emulated link. `scaler`: to `follow`. `undo`: see
    `gradwire.attach`. `averager` is what hooks and reducers call.
    """

    averager: CompressedAverager
    before_bucket: Callable[[dist.GradBucket], None] | None = None  # what looks at a bucket before it is averaged

    def __init__(
        self,
        spec: Spec,
        process_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        *,
        partial: bool = False,
        transport: Decorator | None = None,
        scaler: Scaler | None = None,
        undo: bool | None = None,
    ) -> None:
        groups = [process_group] if isinstance(process_group, dist.ProcessGroup) else process_group or ()
        settings: dict[str, Any] = {"partial": partial, "decorate": transport, "undo": undo}
        self.averager = CompressedAverager(compressor(spec), groups, timeout, **settings)
        self.torch_steps = TorchSteps(self.averager)
        self._bound = False
        self.frozen: frozenset[str] = frozenset()  # names of the model's parameters that do not train
        if scaler is not None:
            self.follow(scaler)

    def bind(self, model: nn.Module, *, changed: bool = False) -> None:
        """Key the state by the names of `model`'s parameters; without it they are numbered as DDP hands them over.

        `changed`: parameters were added, frozen or replaced. A new one takes the state of the one that had its name and
        shape, and the state of those that train no more is dropped. Otherwise raises ValueError where what is held for a
        parameter would have no name in the model.
        """
        model = model.module if isinstance(model, DistributedDataParallel) else model
        plain = plain_names(name for name, _ in model.named_parameters())
        names: dict[Tensor, str] = {
            parameter: plain[name] for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        self.frozen = frozenset(plain[name] for name, each in model.named_parameters() if not each.requires_grad)
        saved, before = self.averager.snapshot().state_dict(), self.averager.names
        renamed = {name: name for name in names.values()} if not before else {}
        renamed |= {old: names[parameter] for parameter, old in before.items() if parameter in names}
        if changed:
            new = {name: parameter.shape for parameter, name in names.items() if name not in renamed.values()}
            renamed |= {old: old for parameter, old in before.items() if new.get(old) == parameter.shape}
        elif lost := sorted(set(saved["parameters"]) - set(renamed)):
            raise ValueError(f"the state has parameters that the model does not train: {', '.join(lost)}")
        self.averager.names, self._bound = names, True
        self.averager.load(checkpoint.renamed(saved, renamed), follow=False)

    def name(self, parameters: Mapping[Tensor, str]) -> None:
        """Key the state by these names, too, of tensors that are no model's own parameters, such as shards."""
        self.averager.names, self._bound = {**self.averager.names, **parameters}, True

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket over ranks; DDP's hook. The future holds the bucket's buffer, averaged in place."""
        if self.before_bucket is not None:
            self.before_bucket(bucket)
        return self.torch_steps.average(bucket)

    @property
    def compressor(self) -> Compressor:
        """The one in use."""
        return self.averager.memory.compressor

    @property
    def called(self) -> bool:
        """True if a step has begun with it."""
        return self.averager.engines.agreement.step > 0

    def swap(self, spec: Spec, *, optimizer: Optimizers | None = None) -> None:
        """Go on with another compressor from the next step; nothing held back is lost. All ranks swap at one step.

        `optimizer`: as for `attach`. On another thread than training's, a step that is under way comes to its end first.
        """
        self.averager.replace(compressor(tuned(spec, optimizer)))

    def follow(self, scaler: Scaler) -> None:
        """Multiply what is held back whenever the scale of a torch.amp.GradScaler has changed, and leave `rescale` out.

        It looks at the scale once a step; on CUDA the host waits for it, as it does in `scaler.step()`.
        """
        self._follow(scaler, self.averager)

    @property
    def scaler(self) -> Scaler | None:
        """The one that it follows."""
        return self._loss_scale.scaler if self._loss_scale is not None else None

    def _what(self) -> str:
        return specification(self.compressor)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint of this rank needs; safe with `torch.load(weights_only=True)`. Residuals differ by rank.

        {"gradwire": format, "compressor", "world_size", "rank", "step": synced backwards, "buckets": [[name]],
        "parameters": {name: {field: tensor}}, "orders": {name: axes in memory, if not row by row}, "tensors": how many,
        "spec": of the compressor}

        It is the state after the last step that came to its end, which a step that is under way on another thread does
        first; training is not held up. After a backward that broke off, residuals that it has overwritten are zeros, unless
        `undo=True`.
        """
        if self._loss_scale is not None:
            self.averager.between_steps(self._loss_scale.catch_up)  # the scaler is saved with its new scale
        return self.sealed(self.averager.snapshot())

    def sealed(self, snapshot: Snapshot) -> dict[str, Any]:
        """The state of a snapshot, as `state_dict` returns it."""
        names, ranks = self.averager.names, self.averager.engines.ranks
        state = snapshot.state_dict()
        if self._bound and not snapshot.begun:
            state["parameters"] = checkpoint.blank(snapshot.compressor, names, ranks)
        return checkpoint.sealed(state, snapshot.compressor, names, ranks)

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, resize: bool = False) -> None:
        """Go on from this rank's `state_dict()`; training then is bit-identical to not having stopped.

        (Not the order in which more than two ranks of a host are summed, where a swap to `none` came before the save.)

        `resize`: `saved` has the states of all ranks, on every rank, and there may be another number of ranks now: the mean
        of what they held back is owed to the next average. On another thread than training's, a step that is under way
        comes to its end first. What the state has of parameters that are frozen now is left out, and a warning names them.
        Raises ValueError, changing nothing, where it was saved with another compressor, rank or model.
        """
        self._load(self._merged(saved) if resize else self.fitting(saved))

    def fitting(self, saved: Any) -> dict[str, Any]:
        """This rank's saved state, checked. Raises ValueError where it does not fit."""
        if checkpoint.is_gathered(saved):
            raise ValueError("the state has those of all ranks: all ranks call scatter_state_dict(saved)")
        ranks = self.averager.engines.ranks
        state = checkpoint.checked(saved, self.compressor, ranks, self.frozen)
        if self._bound:
            checkpoint.check_parameters(state, self.compressor, self.averager.names, ranks)
        checkpoint.check_whole(state)
        return state

    def _merged(self, states: Any) -> dict[str, Any]:
        """Return the state from which all ranks continue, given those of all. Raises ValueError if they do not fit."""
        if not self._bound:
            raise ValueError(UNBOUND)
        return merged(states, self.compressor, self.averager.names, self.frozen)

    def _load(self, state: Mapping[str, Any]) -> None:
        self.averager.load(state)
        if self._loss_scale is not None:
            self._loss_scale.forget()

    def gather_state_dict(self) -> dict[str, Any]:
        """On the first rank the states of all ranks as one, on the others {}: for frameworks that save on rank 0 alone.

        All ranks call it, between steps. {"gradwire": format, "ranks": (`state_dict()` of each rank, on the CPU)}: safe with
        `torch.load(weights_only=True)`, and one value for torch.distributed.checkpoint. The first rank holds them all.
        After some seconds a warning names the ranks that have not called it. Raises RuntimeError where they do not within
        the handle's timeout.
        """
        self._await_all("gather_state_dict")
        mine = checkpoint.on_cpu(self.state_dict())
        states = gathered(mine, self.averager.engines.group, self._device, what="what they hold back")
        return checkpoint.all_states(states) if states else {}

    def scatter_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `gather_state_dict` returned; all ranks call it, and what the first one gives counts.

        With as many ranks as then each goes on from its own state; else the mean of what all held back is owed to the next
        average, as with `load_state_dict(resize=True)`. Raises ValueError, changing nothing, where it does not fit.
        """
        self._await_all("scatter_state_dict")
        group = self.averager.engines.group
        shares = self._shares(saved, group.size()) if group.rank() == 0 else []
        share = scattered(shares, group, self._device, what="what they held back")
        if isinstance(share, str):
            raise ValueError(share)
        self._load(share["merged"]) if "merged" in share else self.load_state_dict(share)

    def _await_all(self, call: str) -> None:
        await_all(self.averager.engines.group, call, self.averager.engines.timeout)

    def _shares(self, saved: Mapping[str, Any], ranks: int) -> Sequence[Mapping[str, Any] | str]:
        """Return what each rank is to load: its own state, the merged one, or the text of an error."""
        try:
            states = checkpoint.states_of(saved)
            if len(states) == ranks:
                return states
            return [{"merged": self._merged(states)}] * ranks
        except ValueError as error:
            return [str(error)] * ranks

    @property
    def _device(self) -> torch.device:
        """The device of the model's parameters, as far as they are known."""
        return next((parameter.device for parameter in self.averager.names), torch.device("cpu"))

    def __getstate__(self) -> dict[str, Any]:
        """Without threads and process groups; a copy reduces on the default group."""
        averager = self.averager
        snapshot, memory = averager.snapshot(), averager.memory
        settings = {"compressor": snapshot.compressor, "timeout": averager.engines.timeout, "partial": memory.partial}
        return {
            **settings,
            "undo": memory.undo,
            "names": averager.names,
            "bound": self._bound,
            "frozen": self.frozen,
            "state": snapshot.state_dict(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        Handle.__init__(self, state["compressor"], None, state["timeout"], partial=state["partial"], undo=state["undo"])
        self.averager.names, self._bound, self.frozen = state["names"], state["bound"], state["frozen"]
        self.averager.load(state["state"], follow=False)

    def close(self) -> None:
        """End the threads and process groups that the hook made; training with it is over."""
        self.averager.totals.close()
        self.averager.close()
