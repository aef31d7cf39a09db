"""The user's handle of an FSDP2 model that gradwire communicates for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...compress import Optimizers, Spec, compressor, tuned
from ...compress.shards.hosts import split_hosts, split_option
from ...compress.shards.reduction import ShardState, ShardSum, shard_sum
from ...compress.shards.weights import HeldWeights, OwnRows, WeightGather, weight_gather
from ...compress.state.tree import Entries
from ...ddp_core import Handle, Observed
from ...ddp_core.averaging.averager import CompressedAverager
from ...ddp_core.averaging.shard_averager import ShardAverager
from ...ddp_core.averaging.shown_averages import OnAverage
from ...ddp_core.measure.step import Step
from ...ddp_core.memory.model_memory import Snapshot
from ...ddp_core.memory.shard_memory import Key, ShardSnapshot
from ...ddp_core.memory.shard_memory import saved as weights_in_use
from .modules import ShardedModule
from .state import FORMAT, among_replicas, checked, key_of, merged, owed_by_replicas, own

BETWEEN_REPLICAS = ("sent_bytes", "total_sent_bytes", "ratio", "link_bytes_per_second")  # metrics


class ShardHandle(Observed):
    """The communication of an FSDP2 model on this rank: gathered weights and reduced gradients.

    `gradwire.attach(fsdp_model, gather=..., reduce=...)` makes it. All ranks make one with the same arguments, and
    call `swap` and `load_state_dict` at the same step.

    Attributes:
        replicas: the `Handle` of the compression between the replicas of hybrid sharding, or None. It has its own
            `stats`, `metrics` and `swap`. If gradwire communicates between replicas only, both report the same figures.
    """

    averager: ShardAverager

    def __init__(
        self,
        averager: ShardAverager,
        replicas: Handle | None,
        modules: Sequence[ShardedModule],
        trained: Sequence[Tensor],
        *,
        of_shards: bool,
    ) -> None:
        self.averager, self.replicas, self._modules, self._of_shards = averager, replicas, modules, of_shards
        self._trained = trained
        for each in (averager, *([] if replicas is None else [replicas.averager])):
            each.engines.speaks = modules[0].place[0] == 0  # of all, where each has a group of its own
        for module in modules:  # so that a state tells from the start what it will hold
            layout = module.layout()
            if layout.whole.names:
                averager.memory.get(module.index, layout)
        self._hold_weights()
        self._look_for_discarded()

    @property
    def reported(self) -> ShardAverager | CompressedAverager:
        """The averager of the shards, or that of the replicas if gradwire communicates between replicas only."""
        return self.averager if self._of_shards or self.replicas is None else self.replicas.averager

    def _hold_weights(self) -> None:
        """Hold the weights in use, anew, where differences to them travel."""
        self.averager.in_use.forget()
        for module in self._modules if self.averager.weights.differences else ():
            for kind in filter(lambda each: each.numbers, module.kinds):
                self.averager.in_use.get((module.index, kind.dtype), kind.layout)

    def _look_for_discarded(self) -> None:
        """Look for averages that are thrown away: among shards if their sums keep residuals, else among replicas.

        If one averager has found some, none looks any more: the handle warns once.
        """
        averagers = [self.averager] if self.replicas is None else [self.averager, self.replicas.averager]
        trained = () if any(each.discarded.warned for each in averagers) else self._trained
        self.averager.look_for_discarded(trained)
        if self.replicas is not None:
            self.replicas.averager.look_for_discarded(() if self.averager.memory.reduction.feedback else trained)

    def swap(
        self,
        *compressors: Spec,
        gather: Spec | None = None,
        reduce: Spec | None = None,
        replicas: Spec | None = None,
        optimizer: Optimizers | None = None,
    ) -> None:
        """Use other compressors from the next step on. All ranks swap at the same step.

        An argument that you leave out changes nothing.

        Residuals go into the next gradients. With `gather`, the next weights are exact if differences are to travel.

        Args:
            compressors: none, since FSDP2 has two.
            gather: the compressor of gathered weights.
            reduce: the compressor of reduced gradients.
            replicas: the compressor between the replicas of hybrid sharding.
            optimizer: as for `gradwire.attach`; the one that it was given if you leave it out.

        Raises:
            TypeError: a compressor is given without its name, as for DDP.
            ValueError: a compressor is refused, or gradwire does not communicate where the argument says. Nothing changes.
            RuntimeError: the handle is closed.
        """
        self._refuse_closed()
        if compressors:
            given = ", ".join(map(repr, compressors))
            raise TypeError(
                f"FSDP2 has two compressors, of weights and of gradients, got {given}: name them, as in "
                "swap(gather='int8', reduce='int8')"
            )
        if not self._of_shards and (gather is not None or reduce is not None):
            raise ValueError(
                f"gradwire communicates between replicas only here, got gather={gather!r} and reduce={reduce!r}: leave both "
                "out, as in swap(replicas='int8')"
            )
        if self.replicas is None and replicas is not None:
            raise ValueError(
                f"gradwire does not communicate between replicas here, got replicas={replicas!r}: leave it out, or pass "
                "replicas= to gradwire.attach, for a mesh of two dimensions"
            )
        optimizer = self.optimizer if optimizer is None else optimizer
        reduction = None if reduce is None else shard_sum(reduce, optimizer)
        weights = None if gather is None else weight_gather(gather)
        if replicas is not None:
            compressor(tuned(replicas, optimizer))  # refused before anything changes
        if self._of_shards:
            self.averager.between_steps(lambda: self._replace(reduction, weights))
        self.suit(optimizer, {}, reduce or "none")
        if self.replicas is not None and replicas is not None:
            self.replicas.swap(replicas, optimizer=optimizer)

    def forward_begins(self) -> None:
        """Do as any handle, and have the replicas' note the values of their shards."""
        super().forward_begins()
        if self.replicas is not None:
            self.replicas.forward_begins()

    def suit(self, optimizer: Optimizers | None, names: Mapping[Tensor, str], *specs: Spec) -> None:
        """Do as any handle, for the compressors between hosts."""
        super().suit(optimizer, names, *(split_hosts(split_option(spec, "inside")[1])[1] for spec in specs))

    def _replace(self, reduction: ShardSum | None, weights: WeightGather | None) -> None:
        averager = self.averager
        averager.replace(reduction or averager.memory.reduction, weights or averager.weights)
        self._look_for_discarded()
        if weights is not None:
            self._hold_weights()

    def _rescale(self, factor: float) -> None:
        if self.replicas is not None:
            self.replicas.averager.memory.rescale(factor)  # first: it refuses right after a load
        super()._rescale(factor)

    def _discard(self) -> None:
        if self._of_shards or self.replicas is None:  # else nothing of gradwire's has steps among shards
            super()._discard()
        if self.replicas is not None:
            self.replicas.averager.memory.discard_step()

    def _show(self, function: OnAverage | None) -> None:
        if self.replicas is not None:
            self.replicas.averager.shown.function = function  # who averages last
        elif self.averager.replica_transport is not None:
            raise ValueError(
                "torch averages over replicas after gradwire here: pass replicas='none' to attach() as well"
            )
        else:
            super()._show(function)

    def _what(self) -> str:
        shards = [f"gather {self.averager.weights}", f"reduce {self.averager.memory.reduction}"]
        replicas = [] if self.replicas is None else [f"replicas {self.replicas._what()}"]
        return ", ".join((shards if self.reported is self.averager else []) + replicas)

    def _metrics(self, most: int = 1, seen: Step | None = None) -> dict[str, float]:
        found = super()._metrics(most, seen)
        if self.replicas is None or self.reported is not self.averager:
            return found
        of_replicas = self.replicas._metrics(most)
        return found | {f"replica_{name}": of_replicas[name] for name in BETWEEN_REPLICAS if name in of_replicas}

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for a checkpoint, after the last step that ended.

        Any thread may call it. A step that is under way on another thread ends first; training is not held up. After
        a backward that was interrupted, the residuals that it had overwritten are zeros, unless `undo=True`.

        Returns:
            {"rank 0 of 4": {"gradwire": format, "reduce", "step", "parameters": {name: {field: tensor}}, "tensors":
            their number}}. The key differs between ranks, so that torch.distributed.checkpoint saves those of all
            ranks together; with tensor parallelism it is "rank 0 of 2, part 1 of 2". Tensors have the shapes of whole
            parameters. Where differences of weights travel, "weights" has this rank's shards. With replicas, their
            handle's state is in it as "replicas".
        """
        self._catch_up()
        snapshot, of_replicas, in_use = self.averager.steps.snapshot(self._taken)
        parameters: Entries = snapshot.save()
        inside = {
            "gradwire": FORMAT,
            "reduce": str(snapshot.reduction),
            "step": snapshot.step,
            "parameters": parameters,
            "tensors": sum(map(len, parameters.values())),
            "weights": weights_in_use(in_use),
        }
        if self.replicas is not None and of_replicas is not None:
            inside["replicas"] = self.replicas.sealed(of_replicas)
        return {self._key(): inside}

    def _taken(self) -> tuple[ShardSnapshot, Snapshot | None, Sequence[OwnRows]]:
        """Snapshots of all memories after the same step."""
        shards, replicas = self.averager, None if self.replicas is None else self.replicas.averager
        of_replicas = None if replicas is None else replicas.memory.snapshot(under_way=replicas.under_way)
        return shards.memory.snapshot(), of_replicas, shards.in_use.snapshot()

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, resize: bool = False) -> None:
        """Continue from a saved state. The state of parameters that are frozen now is left out, and a warning names them.

        Args:
            saved: this rank's `state_dict()`; with `resize` a list with the states of all ranks, the same on every
                rank.
            resize: True continues on another number of ranks: each rank, and each shard's replicas, gets the mean of
                the residuals. The next weights are sent exactly. Tensor parallelism stays as it was.

        Raises:
            ValueError: the state does not fit. Nothing changes then.
        """
        memory = self.averager.memory
        inside = merged(saved, self._modules[0].part) if resize else own(saved, self._key())
        frozen = frozenset().union(
            *(set(module.names).difference(module.layout().whole.names) for module in self._modules)
        )
        names = memory.names() - frozen
        state = checked(inside, memory.reduction, names, frozen, warn=self.averager.engines.first)
        if self.replicas is None:
            of_replicas = None
        else:
            self.replicas.frozen = frozen
            of_replicas = self._carried(state) if resize else self.replicas.fitting(among_replicas(state))
        states = self.averager.loaded(state["parameters"], means=resize)
        in_use = self.averager.in_use.loaded({} if resize else state["weights"])
        self.averager.between_steps(lambda: self._load(states, state["step"], in_use, of_replicas))

    def _load(
        self,
        states: Mapping[int, ShardState],
        step: int,
        in_use: Mapping[Key, HeldWeights],
        of_replicas: Mapping[str, Any] | None,
    ) -> None:
        self.averager.load(states, step, in_use)
        if self.replicas is not None and of_replicas is not None:
            self.replicas.averager.load(of_replicas)
        if self._loss_scale is not None:
            self._loss_scale.forget()

    def _carried(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the state from which replicas continue, if there were some, given the merged state of all ranks."""
        if self.replicas is None or "replicas" not in state:
            return None
        layouts = [module.layout() for module in self._modules]
        return owed_by_replicas(state["replicas"], layouts, self.replicas.compressor, self.replicas.frozen)

    def _key(self) -> str:
        module = self._modules[0]
        return key_of(*module.place, module.part)

    def close(self) -> None:
        """End the compression: torch communicates by itself again, and residuals are dropped."""
        if self.closed:
            return  # another handle may communicate for the modules now
        self.closed, self.optimizer = True, None
        self.averager.totals.close()
        for module in self._modules:
            module.give_back()
        self.averager.close()
        if self.replicas is not None:
            self.replicas.close()
