"""The weights in use of sharded modules, where differences to them travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...compress.shards.layout import ShardLayout
from ...compress.shards.weights import HeldWeights, OwnRows
from ...compress.state.tree import Entries

Key = tuple[int, torch.dtype]


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
                held.resumes = not bool(held.own.flat.isnan().any())
        return fresh

    def load(self, held: Mapping[Key, HeldWeights]) -> None:
        """Use these from now on, of `loaded`. The other ranks' rows come with the next gather."""
        self._held = dict(held)


def saved(rows: Sequence[OwnRows]) -> Entries:
    """Copies of a snapshot, by parameter name."""
    return {name: fields for each in rows for name, fields in each.save("").items()}
