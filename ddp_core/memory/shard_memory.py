"""The residuals of sharded parameters, module by module, by parameter name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...compress.shards.layout import ShardLayout
from ...compress.shards.reduction import Finite, ShardResidual, ShardState, ShardSum
from ...compress.shards.weights import HeldWeights, OwnRows, parts_of
from ...compress.state.tree import Entries, Leaves
from .bucket_memory import DeviceFlag
from .out_of_memory import META, allocated
from .step_memory import StepMemory

Key = tuple[int, torch.dtype]


@dataclass(frozen=True)
class ShardSnapshot:
    """The memory of sharded parameters after `step` steps; later ones do not change it."""

    reduction: ShardSum
    step: int
    leaves: Sequence[Leaves]

    def save(self) -> Entries:
        """Copies of all that is held back, by parameter name and field."""
        entries: Entries = {}
        for each in self.leaves:
            entries.update(each.save())
        return entries


class ShardMemory(StepMemory):
    """The states of all modules whose parameters are sharded. `undo`: see `StepMemory`.

    A step that met a gradient which is not finite, on any rank, is one that GradScaler skips: what it held back is undone.
    `finite`: flags of the current or last step.
    """

    def __init__(self, reduction: ShardSum, undo: bool = False) -> None:
        super().__init__(undo)
        self.reduction = reduction
        self._states: dict[int, ShardState] = {}  # by the number of the module
        self._leaves: dict[int, Leaves] = {}
        self.finite = Finite()
        self.under_way = False  # a step has begun, and not come to its end

    def states(self) -> Iterable[Leaves]:
        """Return the leaves of each module."""
        return self._leaves.values()

    def get(self, index: int, layout: ShardLayout) -> ShardState:
        """The state of a module; where its parameters have changed, what is held back of those that stay goes with them.

        Nothing is remembered of an `unnamed` gradient: what is held back waits for one whose parameters are known.
        """
        state = self._states.get(index)
        if state is not None and state.layout is layout:
            return state
        layout = layout.on_hosts(self.reduction.per_host)
        if layout.unnamed:
            fresh = _new_state(self.reduction, layout)
            Leaves(fresh).set_step(max(self.step - 1, 0))
            return fresh
        if state is None or state.layout != layout:
            saved = self._leaves[index].save() if state is not None else {}
            state = self._put(index, self._filled(layout, saved), blank=not saved)
        return state

    def _filled(self, layout: ShardLayout, entries: Mapping[str, Mapping[str, Tensor]]) -> ShardState:
        """Return a new state with saved numbers, also those of a codec before this one that the next step brings out."""
        state = _new_state(self.reduction, layout)
        if state.residual is None and not entries.keys().isdisjoint(layout.whole.names):
            state.residual = ShardResidual.zeros(state.layout)
        Leaves(state).load(entries)
        return state

    def _put(self, index: int, state: ShardState, *, blank: bool = True) -> ShardState:
        """Take a state. Where no codec holds anything back, its residual comes out in the next step, which may be undone."""
        state.finite = self.finite
        if state.residual is not None:
            state.residual.versioned = self.undo or not self.reduction.feedback
        leaves = Leaves(state)
        leaves.blank = blank
        leaves.set_step(max(self.step - 1, 0))
        self._states[index], self._leaves[index] = state, leaves
        return state

    def begin_step(self) -> int:
        """Commit the step before. Return the number of the one whose first gradients come next."""
        self.commit()
        self.step += 1
        self.under_way, self.committed, self.finite = True, False, Finite()
        for index, state in self._states.items():
            state.finite = self.finite
            if self._leaves[index].counters:
                self._leaves[index].set_step(self.step - 1)
        return self.step

    def end_step(self) -> None:
        """End the step: all of its shards are there."""
        self.under_way = False

    @property
    def counts(self) -> bool:
        """True if the last step is remembered, and can still be undone."""
        return not self.committed and self._keeps()

    def _keeps(self) -> bool:
        """Return True if the last step counts: it has ended, met only finite numbers, and nobody has discarded it."""
        if self.under_way or self._discarded:
            return False
        return self.finite.everywhere is None or bool(DeviceFlag(self.finite.everywhere))

    def commit(self) -> None:
        """Keep what the last step held back, or undo it."""
        if self.committed:
            return
        keep = self._keeps()
        lost = [leaves.end_step(keep=keep) for leaves in self._leaves.values()]
        self.under_way, self.committed, self._discarded = False, True, False
        if any(lost):
            self.note_loss()
        if self.reduction.feedback:
            return
        for index, state in self._states.items():  # to which no step will write again
            if state.residual is not None and state.residual.cleared:
                state.residual = None
                self._put(index, state)

    def rescale(self, factor: float) -> None:
        """Multiply what is held back."""
        self.commit()
        for leaves in self._leaves.values():
            leaves.rescale(factor)

    def replace(self, reduction: ShardSum) -> None:
        """Go on with another way to sum; what is held back goes into the next gradients.

        Raises ValueError, changing nothing, where it cannot.
        """
        self.commit()
        all_fresh = {index: _new_state(reduction, state.layout) for index, state in self._states.items()}
        for index, fresh in all_fresh.items():
            fresh.residual = _moved(self._states[index].residual, fresh)
        self.reduction = reduction
        for index, fresh in all_fresh.items():
            self._put(index, fresh, blank=self._leaves[index].blank)

    def snapshot(self) -> ShardSnapshot:
        """The memory after the last step that came to its end; copies pointers only."""
        if self.under_way:
            self.note_save_within()
        newest = self.committed or self._keeps()
        undone = not (self.under_way or newest)
        leaves = [each.snapshot(newest=newest, undone=undone) for each in self._leaves.values()]
        return ShardSnapshot(self.reduction, self.step - self.under_way, leaves)

    def loaded(self, entries: Mapping[str, Mapping[str, Tensor]], *, means: bool = False) -> dict[int, ShardState]:
        """The states of modules as they were saved. Raises ValueError, changing nothing, for a shape that does not fit.

        `means`: the entries are means over all ranks, of which each rank owes as much as it keeps rows for.
        """
        if means and self.reduction.per_host > 1:
            entries = {**entries, **self._shares(entries)}
        return {index: self._filled(state.layout, entries) for index, state in self._states.items()}

    def _shares(self, entries: Mapping[str, Mapping[str, Tensor]]) -> Entries:
        """Return what this rank owes of what all ranks owe: of its own rows, what the ranks of its host would."""
        shares: Entries = {}
        for layout in (state.layout for state in self._states.values()):
            every = layout.on_hosts(1)
            for name in filter(entries.__contains__, layout.whole.names):
                for field, whole in entries[name].items():
                    numbers = whole.new_zeros(every.numel)
                    every.cut(name, whole, numbers)
                    own = layout.joined(layout.kept(numbers))[name]
                    shares.setdefault(name, {})[field] = own.mul_(layout.whole.ranks.per_host)
        return shares

    def load(self, states: Mapping[int, ShardState], step: int) -> None:
        """Go on from these states, of `loaded`, and from nothing else."""
        self.commit()
        self.step = step
        for index, state in states.items():
            self._put(index, state, blank=False)

    def names(self) -> set[str]:
        """The parameters of all modules."""
        return {name for state in self._states.values() for name in state.layout.whole.names}


def _new_state(reduction: ShardSum, layout: ShardLayout) -> ShardState:
    """Return a state of zeros. Raises torch.OutOfMemoryError with what it takes."""

    def told() -> tuple[str, int]:
        nowhere = replace(layout, whole=replace(layout.whole, device=META))
        return "reduce= (FSDP2's gradients)", Leaves(reduction.init(nowhere)).nbytes

    return allocated(lambda: reduction.init(layout), told, layout.whole)


def _moved(held: ShardResidual | None, state: ShardState) -> ShardResidual | None:
    """Return a residual as wide as it is to be now, of the rows of a new state."""
    fresh = state.residual
    if held is None or (held.layout == state.layout and (fresh is None or held.store == fresh.store)):
        return held or fresh
    fresh = fresh or ShardResidual.zeros(state.layout)
    fresh.set(fresh.kept(held.layout.spread(held.wide())))
    return fresh


class WeightMemory:
    """The weights in use, by the number of the module and their type. Those of a step stand when it has come to its end."""

    def __init__(self) -> None:
        self._held: dict[Key, HeldWeights] = {}

    def get(self, key: Key, layout: ShardLayout) -> HeldWeights:
        """Return the weights in use of a module, of one type."""
        if key not in self._held:
            self._held[key] = HeldWeights(OwnRows.empty(layout))
        return self._held[key]

    def end_step(self) -> None:
        """Let the weights in use stand that were gathered for the step."""
        for held in self._held.values():
            held.own.keep()

    def forget(self) -> None:
        """Hold nothing. The next gathers send the exact weights."""
        self._held.clear()

    def snapshot(self) -> Sequence[OwnRows]:
        """Return this rank's rows after the last step that came to its end; later steps do not change them."""
        return [held.own.snapshot() for held in self._held.values()]

    def loaded(self, entries: Mapping[str, Mapping[str, Tensor]]) -> dict[Key, HeldWeights]:
        """Return the weights in use as they were saved. Raises ValueError, changing nothing, for a shape that differs."""
        fresh = {index: HeldWeights(OwnRows.empty(held.own.layout)) for index, held in self._held.items()}
        for held in fresh.values():
            if entries:
                held.own.load("", entries)
                held.resumes = not bool(parts_of(held.own.flat)[0].isnan().any())  # the weights in use
        return fresh

    def load(self, held: Mapping[Key, HeldWeights]) -> None:
        """Use these from now on, of `loaded`. The other ranks' rows come with the next gather."""
        self._held = dict(held)


def saved(rows: Sequence[OwnRows]) -> Entries:
    """Copies of a snapshot, by parameter name."""
    return {name: fields for each in rows for name, fields in each.save("").items()}
