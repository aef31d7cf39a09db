"""The residuals of sharded parameters, module by module, by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...compress.shards.layout import ShardLayout
from ...compress.shards.reduction import Finite, ShardState, ShardSum
from ...compress.shards.residual import ShardResidual
from ...compress.state.tree import Entries, Leaves, summed
from .bucket_memory import NOT_TO_DISCARD
from .device_flag import DeviceFlag


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


class ShardMemory:
    """The states of all modules whose parameters are sharded, with every step a transaction.

    A step that met a gradient which is not finite, on any rank, is one that GradScaler skips: what it held back is undone.
    """

    def __init__(self, reduction: ShardSum) -> None:
        self.reduction = reduction
        self.step = 0
        self._states: dict[int, ShardState] = {}  # by the number of the module
        self._leaves: dict[int, Leaves] = {}
        self._finite = Finite()
        self.under_way = False  # a step has begun, and not come to its end
        self._committed = True  # the last step can be taken back no more
        self._discarded = False

    def get(self, index: int, layout: ShardLayout) -> ShardState:
        """The state of a module; where its parameters have changed, what is held back of those that stay goes with them."""
        state = self._states.get(index)
        if state is None or state.layout != layout:
            saved = self._leaves[index].save() if state is not None else {}
            state = self._put(index, self.reduction.init(layout))
            self._leaves[index].load(saved)
        return state

    def _put(self, index: int, state: ShardState) -> ShardState:
        state.finite = self._finite
        self._states[index], self._leaves[index] = state, Leaves(state, versioned=True)
        self._leaves[index].set_step(max(self.step - 1, 0))
        return state

    def begin_step(self) -> None:
        """The first gradients of a step come next."""
        self.commit()
        self.step += 1
        self.under_way, self._committed, self._finite = True, False, Finite()
        for index, state in self._states.items():
            state.finite = self._finite
            self._leaves[index].set_step(self.step - 1)

    def end_step(self) -> None:
        """End the step: all of its shards are there."""
        self.under_way = False

    def _keeps(self) -> bool:
        """Return True if the last step counts: it has ended, met only finite numbers, and nobody has discarded it."""
        if self.under_way or self._discarded:
            return False
        return self._finite.everywhere is None or bool(DeviceFlag(self._finite.everywhere))

    def commit(self) -> None:
        """Keep what the last step held back, or undo it."""
        if self._committed:
            return
        keep = self._keeps()
        for leaves in self._leaves.values():
            leaves.keep() if keep else leaves.undo()
        self.under_way, self._committed, self._discarded = False, True, False
        self._drop_released()

    def _drop_released(self) -> None:
        """Let go of residuals that no step will write to again."""
        for index, state in self._states.items():
            if state.residual is not None and state.residual.cleared and not self.reduction.feedback:
                state.residual = None
                self._leaves[index] = Leaves(state, versioned=True)

    def discard_step(self) -> None:
        """Have the last step undone. Raises RuntimeError where there is none that can be."""
        if self._committed:
            raise RuntimeError(NOT_TO_DISCARD)
        self._discarded = True

    def rescale(self, factor: float) -> None:
        """Multiply what is held back."""
        self.commit()
        for leaves in self._leaves.values():
            leaves.rescale(factor)

    def replace(self, reduction: ShardSum) -> None:
        """Go on with another way to sum; what is held back goes into the next gradients."""
        self.commit()
        held = {index: state.residual for index, state in self._states.items()}
        self.reduction = reduction
        for index, state in list(self._states.items()):
            fresh = reduction.init(state.layout)
            fresh.residual = _moved(held[index], fresh.residual)
            self._put(index, fresh)

    def snapshot(self) -> ShardSnapshot:
        """The memory after the last step that came to its end; copies pointers only."""
        newest = self._committed or self._keeps()
        leaves = [each.snapshot(newest=newest) for each in self._leaves.values()]
        return ShardSnapshot(self.reduction, self.step - self.under_way, leaves)

    def loaded(self, entries: Mapping[str, Mapping[str, Tensor]]) -> dict[int, ShardState]:
        """The states of modules as they were saved. Raises ValueError, changing nothing, for a shape that does not fit."""
        fresh = {index: self.reduction.init(state.layout) for index, state in self._states.items()}
        for state in fresh.values():
            Leaves(state).load(entries)
        return fresh

    def load(self, states: Mapping[int, ShardState], step: int) -> None:
        """Go on from these states, of `loaded`, and from nothing else."""
        self.commit()
        self.step = step
        for index, state in states.items():
            self._put(index, state)

    def names(self) -> set[str]:
        """The parameters of which something is or may be held back."""
        held = (state for state in self._states.values() if state.residual is not None)
        return {name for state in held for name in state.layout.whole.names}

    def held_back(self) -> dict[str, Tensor]:
        """Return the gradient that this rank has not given to a sum yet, flat, by parameter name."""
        self.commit()
        return summed(leaves.held_back() for leaves in self._leaves.values())


def _moved(held: ShardResidual | None, fresh: ShardResidual | None) -> ShardResidual | None:
    """Return a residual as wide as it is to be now."""
    if held is None or fresh is None or held.store == fresh.store:
        return held or fresh
    fresh.set(held.wide())
    return fresh
