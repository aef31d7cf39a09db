"""One rank's compression of one model: what a communication hook calls, and what the user holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..compress import Compressor, Optimizers, Spec, compressor, specification, tuned
from .averaging.averager import CompressedAverager
from .buckets.grad_bucket import plain_names
from .memory import checkpoint
from .memory.checkpoint import merged
from .memory.model_memory import Snapshot
from .memory.rescaled_residuals import Scaler
from .observed import Observed
from .transport.lost_ranks import await_all
from .transport.protocol import Decorator
from .transport.rank_messages import gathered, scattered, unlike
from .transport.torch_groups import as_groups

UNBOUND = "a state of another number of ranks needs the model's parameters: call handle.bind(model) first"


class Handle(Observed):
    """The compression of a model's gradients on this rank, made by `gradwire.attach` or `gradwire.comm_hook`.

    All ranks make one with the same compressor, and call `swap` and `load_state_dict` at the same step. `partial`: a
    backward may leave parameters out (DDP's find_unused_parameters). The other arguments are those of `attach`.
    """

    averager: CompressedAverager

    def __init__(
        self,
        spec: Spec,
        process_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
        timeout: timedelta | None = None,
        *,
        partial: bool = False,
        transport: Decorator | None = None,
        scaler: Scaler | None = None,
        undo: bool = False,
    ) -> None:
        groups = as_groups(process_group)
        settings: dict[str, Any] = {"partial": partial, "decorate": transport, "undo": undo}
        self.averager = CompressedAverager(compressor(spec), groups, timeout, **settings)
        self._bound = self._model_named = False  # by `name` or `bind`; by `bind` alone
        self.frozen: frozenset[str] = frozenset()  # names of the model's parameters that do not train
        self.step_detector: Any = None  # finds the steps of torch's DDP under a hook; None: by the indices of buckets
        self.guard: Callable[[dist.GradBucket], bool] | None = None  # looks at a hook's buckets until it returns False
        if scaler is not None:
            self.follow(scaler)

    def bind(self, model: nn.Module, *, changed: bool = False) -> None:
        """Key the state by the names of a model's parameters. Without it, they are numbered as DDP hands them over.

        Args:
            model: the model, wrapped in DDP or not.
            changed: True after parameters were added, frozen or replaced. A new one takes the state of the one that
                had its name and shape. The state of parameters that no longer train is dropped.

        Raises:
            ValueError: the state has a parameter that the model does not train, and `changed` is False.
        """
        model = model.module if isinstance(model, DistributedDataParallel) else model
        plain = plain_names(name for name, _ in model.named_parameters())
        names: dict[Tensor, str] = {
            parameter: plain[name] for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        self.frozen = frozenset(plain[name] for name, each in model.named_parameters() if not each.requires_grad)
        self._catch_up()
        saved, before = self.averager.snapshot().state_dict(), self.averager.names
        renamed = {name: name for name in names.values()} if not before else {}
        renamed |= {old: names[parameter] for parameter, old in before.items() if parameter in names}
        if changed:
            new = {name: parameter.shape for parameter, name in names.items() if name not in renamed.values()}
            renamed |= {old: old for parameter, old in before.items() if new.get(old) == parameter.shape}
        elif lost := sorted(set(saved["parameters"]) - set(renamed)):
            raise ValueError(f"the state has parameters that the model does not train: {', '.join(lost)}")
        self.averager.names, self._bound, self._model_named = names, True, True
        self.averager.strides = {parameter: parameter.stride() for parameter in names}
        state = checkpoint.renamed(saved, renamed)
        self.averager.between_steps(lambda: self.averager.load(state, follow=False))

    def name(self, parameters: Mapping[Tensor, str]) -> None:
        """Key the state by these names, too, of tensors that are no model's own parameters, such as shards."""
        self.averager.names, self._bound = {**self.averager.names, **parameters}, True

    def forward_begins(self) -> None:
        """Read the scale of a scaler, and note the parameters' values if ranks are to compare them: see `StartingValues`."""
        super().forward_begins()
        if self.averager.starting_values.due and torch.is_grad_enabled():
            self.averager.starting_values.note(self.averager.names)

    @property
    def compressor(self) -> Compressor:
        """The compressor in use."""
        return self.averager.memory.compressor

    @property
    def called(self) -> bool:
        """True if a step has begun with it."""
        return self.averager.engines.agreement.step > 0

    def swap(self, spec: Spec, *, optimizer: Optimizers | None = None) -> None:
        """Use another compressor from the next step on. No residual is lost. All ranks swap at the same step.

        On another thread than training's, a step that is under way ends first.

        Args:
            spec: the new compressor. See `gradwire.compressor`.
            optimizer: as for `gradwire.attach`; the one that it was given if you leave it out.

        Raises:
            ValueError: the compressor is unknown or has a wrong option.
            RuntimeError: the handle is closed.
        """
        self._refuse_closed()
        optimizer = self.optimizer if optimizer is None else optimizer
        self.averager.replace(compressor(tuned(spec, optimizer)))
        self.suit(optimizer, self.averager.names if self._model_named else {}, spec)

    @property
    def scaler(self) -> Scaler | None:
        """The scaler that the handle follows, or None."""
        return self._loss_scale.scaler if self._loss_scale is not None else None

    def _what(self) -> str:
        return specification(self.compressor)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for a checkpoint, after the last step that ended. Residuals differ between ranks.

        Any thread may call it. A step that is under way on another thread ends first; training is not held up. After
        a backward that was interrupted, the residuals that it had overwritten are zeros, unless `undo=True`.

        Returns:
            {"gradwire": format, "compressor", "world_size", "rank", "step": synchronized backwards, "buckets":
            [[name]], "parameters": {name: {field: tensor}}, "orders": {name: axes in memory, if not row by row},
            "tensors": their number, "spec": the compressor, "part": of the world, such as "part 0 of 2", if not all of
            it}. It is safe with `torch.load(weights_only=True)`.
        """
        self._catch_up()
        return self.sealed(self.averager.snapshot())

    def sealed(self, snapshot: Snapshot) -> dict[str, Any]:
        """The state of a snapshot, as `state_dict` returns it."""
        names, ranks = self.averager.names, self.averager.engines.ranks
        state = snapshot.state_dict()
        if self._bound and not snapshot.begun:
            state["parameters"] = checkpoint.blank(snapshot.compressor, names, ranks)
        return checkpoint.sealed(state, snapshot.compressor, names, ranks, self.averager.engines.part)

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, resize: bool = False) -> None:
        """Continue from a saved state. Training is then bit-identical to not having stopped.

        (One exception: if a swap to `none` came before the save, more than two ranks of a host may be summed in
        another order.) On another thread than training's, a step that is under way ends first. The state of
        parameters that are frozen now is left out, and a warning names them.

        Args:
            saved: this rank's `state_dict()`; with `resize` a list with the states of all ranks, the same on every
                rank.
            resize: True continues on another number of ranks: the next average receives the mean of all residuals.

        Raises:
            ValueError: the state belongs to another compressor, rank or model. Nothing changes then.
        """
        self._load(self._merged(saved) if resize else self.fitting(saved))

    def fitting(self, saved: Any) -> dict[str, Any]:
        """This rank's saved state, checked. Raises ValueError where it does not fit."""
        if checkpoint.is_gathered(saved):
            raise ValueError("the state has those of all ranks: all ranks call scatter_state_dict(saved)")
        ranks = self.averager.engines.ranks
        state = checkpoint.checked(saved, self.compressor, ranks, self.frozen)
        checkpoint.check_part(saved, self.averager.engines.part)
        if self._bound:
            state = checkpoint.aligned(state, self.compressor, self.averager.names, ranks)
            checkpoint.check_parameters(state, self.compressor, self.averager.names, ranks)
        checkpoint.check_whole(state)
        return state

    def _merged(self, states: Any) -> dict[str, Any]:
        """Return the state from which all ranks continue, given those of all. Raises ValueError if they do not fit."""
        if not self._bound:
            raise ValueError(UNBOUND)
        states = checkpoint.of_part(states, self.averager.engines.part)
        return merged(states, self.compressor, self.averager.names, self.frozen)

    def _load(self, state: Mapping[str, Any]) -> None:
        self.averager.between_steps(lambda: self._continue_from(state))

    def _continue_from(self, state: Mapping[str, Any]) -> None:
        self.averager.load(state)
        if self._loss_scale is not None:
            self._loss_scale.forget()

    def check_parameters(self) -> None:
        """Raise RuntimeError unless the parameters are the same on all ranks, bit for bit. All ranks call it between steps.

        It sends a few bytes, and reads each parameter once. After some seconds a warning names the ranks that have not
        called it.

        Raises:
            RuntimeError: parameters differ, or a rank did not call it within the handle's timeout.
        """
        self._await_all("check_parameters")
        named = {name: parameter for parameter, name in self.averager.names.items()}
        transport = self.averager.engines.transport(self._device)
        if (differing := unlike(named, transport)) is not None:
            raise RuntimeError(differing)

    def gather_state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on rank 0, for frameworks that save there alone. All ranks call it between steps.

        Rank 0 holds all states in CPU memory. After some seconds a warning names the ranks that have not called it.

        Returns:
            {"gradwire": format, "ranks": (the `state_dict()` of each rank)} on rank 0, {} on the others. It is safe
            with `torch.load(weights_only=True)`, and one value for torch.distributed.checkpoint.

        Raises:
            RuntimeError: a rank did not call it within the handle's timeout.
        """
        self._await_all("gather_state_dict")
        mine = checkpoint.on_cpu(self.state_dict())
        states = gathered(mine, self.averager.engines.transport(self._device), what="their residuals")
        return checkpoint.all_states(states) if states else {}

    def scatter_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from the result of `gather_state_dict`. All ranks call it; the argument of rank 0 counts.

        With the same number of ranks each rank continues from its own state. With another number, the next average
        receives the mean of all residuals, as with `load_state_dict(resize=True)`.

        Args:
            saved: the gathered state, on rank 0.

        Raises:
            ValueError: the state does not fit. Nothing changes then.
            RuntimeError: a rank did not call it within the handle's timeout.
        """
        self._await_all("scatter_state_dict")
        transport = self.averager.engines.transport(self._device)
        shares = self._shares(saved, transport.ranks.world_size) if transport.ranks.rank == 0 else []
        share = scattered(shares, transport, what="their residuals")
        if isinstance(share, str):
            raise ValueError(share)
        self._load(share["merged"]) if "merged" in share else self.load_state_dict(share)

    def _await_all(self, call: str) -> None:
        engines, did = self.averager.engines, f"have called {call}()"
        remedy = (
            f"all ranks must call {call}(), also where only the first one saves; take the call out of `if rank == 0:`"
        )
        await_all(engines.group, did, remedy, engines.timeout)

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
        settings = {
            "compressor": snapshot.compressor,
            "timeout": averager.engines.given_timeout,
            "partial": memory.partial,
        }
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
        """End the threads and process groups of the hook. Do not train with it afterwards."""
        self.closed, self.optimizer = True, None
        self.averager.totals.close()
        self.averager.close()
