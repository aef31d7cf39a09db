"""The steps of a memory, of buckets or of shards: each is kept or undone as a whole."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ...compress.state.tree import Leaves
from .out_of_memory import is_out_of_memory

logger = logging.getLogger(__name__)
NOT_TO_DISCARD = (
    "there is no step to discard: call discard_step() after a synchronized backward, and before swap(), rescale() or "
    "load_state_dict()"
)
LOST = (
    "gradwire: the last step does not count (its average was not finite, it was discarded, or its backward broke off). The "
    "residuals that it has overwritten are zero now"
)
UNDONE = (
    "From now on a second copy of the residuals undoes such steps exactly: {:.1f} MB on this rank. Pass undo=True to keep "
    "that copy from the start, or undo=False to do without it"
)
NO_ROOM = (
    "Each later step that does not count sets them to zero, too: there is no memory for the second copy that would undo it, "
    "{:.1f} MB on this rank. residual_bits=8 makes that copy a quarter, and undo=False does without it"
)
SAVED_WITHIN = (
    "gradwire: a state was saved in the middle of a step: by the thread that runs it, or after a backward that broke off or "
    "gave no sign of life for 10 s. The residuals that the step has overwritten are saved as zeros; undo=True saves the old "
    "ones"
)


class StepMemory:
    """The states of all buckets or shards of a model, with every step a transaction.

    `undo`: steps that do not count are undone exactly, by a second copy of residuals; None: from the first such step on that
    finds residuals, which it sets to zero; False: never.
    """

    def __init__(self, undo: bool | None) -> None:
        self.undo, self.step = undo, 0
        self.committed = True  # whether the last step can be taken back no more
        self._discarded = False  # whether it was
        self._warned = False  # of a save within a step

    def states(self) -> Iterable[Leaves]:
        """Return the leaves of all states."""
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
        """Have the next steps that do not count be undone exactly, where `undo` allows: one of them has cost residuals."""
        if self.undo is not None:
            return
        unversioned = [leaf for leaves in self.states() for leaf in leaves.flat if not leaf.versioned]
        megabytes = sum(leaf.flat.nbytes for leaf in unversioned) / 1e6
        try:
            for leaf in unversioned:
                leaf.make_room()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            for leaf in unversioned:
                leaf.versioned = False
                leaf.drop_room()
            self.undo = False
            logger.warning("%s. %s", LOST, NO_ROOM.format(megabytes))
        else:
            self.undo = True
            logger.warning("%s. %s", LOST, UNDONE.format(megabytes))

    def note_save_within(self) -> None:
        """Warn once where a save in the middle of a step lacks residuals."""
        if self.overwrites and not self._warned:
            self._warned = True
            logger.warning(SAVED_WITHIN)
