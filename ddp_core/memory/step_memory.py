"""The steps of a memory, of buckets or of shards: each is kept or undone as a whole, as where gradients overflow."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ...compress.state.tree import Leaves

logger = logging.getLogger(__name__)
NOT_TO_DISCARD = (
    "there is no step to discard: call discard_step() after a synchronized backward, and before swap(), rescale() or "
    "load_state_dict()"
)
LOST = (
    "gradwire: the last step does not count (its average was not finite, it was discarded, or its backward broke off). The "
    "residuals that it has overwritten are zero now, as after each such step. undo=True undoes these steps exactly, by a "
    "second copy of the residuals: %.1f MB on this rank"
)
SAVED_WITHIN = (
    "gradwire: a state was saved in the middle of a step: by the thread that runs it, or after a backward that broke off or "
    "gave no sign of life for 10 s. The residuals that the step has overwritten are saved as zeros; undo=True saves the old "
    "ones"
)


class StepMemory:
    """The states of all buckets or shards of a model, with every step a transaction.

    `undo`: steps that do not count are undone exactly, by a second copy of residuals; without, they set residuals to zero,
    whoever has saved them meanwhile.
    """

    def __init__(self, undo: bool) -> None:
        self.undo, self.step = undo, 0
        self.committed = True  # until a step begins, which can be undone: there is nothing to undo
        self._discarded = False  # whether it was
        self._warned = self._warned_of_loss = False  # of a save within a step

    def states(self) -> Iterable[Leaves]:
        """Return the leaves of all states."""
        raise NotImplementedError

    def commit(self) -> None:
        """Keep the last step, or undo it; nothing changes where that was done."""
        raise NotImplementedError

    @property
    def overwrites(self) -> bool:
        """True if the step that is under way has overwritten any residuals from before it."""
        return any(leaves.overwrites for leaves in self.states())

    @property
    def in_place(self) -> bool:
        """True if steps overwrite residuals."""
        return not self.undo and any(leaves.in_place for leaves in self.states())

    def discard_step(self) -> None:
        """Have the last step undone. Raises RuntimeError where there is none, or none that still can be."""
        if self.committed:
            raise RuntimeError(NOT_TO_DISCARD)
        self._discarded = True

    def note_loss(self) -> None:
        """Warn once where a step that does not count has cost residuals."""
        if not self._warned_of_loss:
            self._warned_of_loss = True
            in_place = (leaf for leaves in self.states() for leaf in leaves.flat if not leaf.versioned)
            logger.warning(LOST, sum(leaf.flat.nbytes for leaf in in_place) / 1e6)

    def note_save_within(self) -> None:
        """Warn once where a save in the middle of a step lacks residuals."""
        if self.overwrites and not self._warned:
            self._warned = True
            logger.warning(SAVED_WITHIN)
