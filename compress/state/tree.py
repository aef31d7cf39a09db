"""The state of compressors, kept by parameter name so that it survives new buckets, checkpoints and swaps.

A compressor's state is a dataclass whose fields are leaves (`PerParameter`, `Chunk`, `Counter`), states of inner
compressors, or tuples of those. `Leaves` finds them once; no compressor writes code of its own for saving and loading, nor
for taking back a step.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ..protocol.layout import Layout
from .leaf import Entries, FlatLeaf, Leaf
from .shares import Share
from .tensors import Chunk, Counter, PerParameter

__all__ = [
    "Chunk",
    "Counter",
    "Entries",
    "FlatLeaf",
    "Leaf",
    "Leaves",
    "PerParameter",
    "held_back",
    "leaves",
    "load",
    "save",
    "set_step",
    "summed",
]


def leaves(state: Any) -> Iterator[tuple[str, Leaf]]:
    """The leaves of a state and their paths, such as `inner.stages.1.q`, by a walk of all its dataclasses and tuples."""
    for place, leaf, _ in _walked(state, "", None):
        yield place, leaf


def _walked(state: Any, path: str, share: Share | None) -> Iterator[tuple[str, Leaf, Share | None]]:
    """The leaves, and the share of a bucket that each is of, where it is not of all of it."""
    if isinstance(state, Leaf):
        yield path, state, share
        return
    found = list(parts(state))
    share = next((part for _, part in found if isinstance(part, Share)), share)
    for name, part in found:
        yield from _walked(part, f"{path}.{name}" if path else name, share)


def parts(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a dataclass or the items of a tuple, with their names; nothing of anything else, nor of a layout.

    A field that is a dictionary stands for its items: each key is a path.
    """
    if isinstance(state, Layout | Share):
        return
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        for field in dataclasses.fields(state):
            value = getattr(state, field.name)
            yield from value.items() if isinstance(value, dict) else ((field.name, value),)
    elif isinstance(state, tuple):
        yield from ((str(index), item) for index, item in enumerate(state))


class Leaves:
    """The leaves of a state, found once: made with the state, used at every step.

    With `versioned` a step writes beside the old numbers, and `undo` takes it back; without, it writes over them. What sets
    the counters is who counts the steps: they are neither kept nor undone.
    """

    def __init__(self, state: Any, *, versioned: bool = False) -> None:
        walked = list(_walked(state, "", None))
        self.blank = True  # no step was kept yet, and nothing was loaded
        self._by_path = {path: leaf for path, leaf, _ in walked}
        self._shares = {path: share for path, _, share in walked if share is not None}
        self.counters = tuple(leaf for leaf in self._by_path.values() if isinstance(leaf, Counter))
        self.flat = tuple(leaf for leaf in self._by_path.values() if isinstance(leaf, FlatLeaf))
        self.residuals = tuple(leaf for leaf in self.flat if leaf.holds_back)
        for leaf in self.flat:
            leaf.versioned = versioned or leaf.versioned

    def version_what_ranks_share(self) -> None:
        """Version what is the same on all ranks, and small; what is made of this rank's gradients stays in place."""
        for leaf in self.flat:
            leaf.versioned = not (leaf.holds_back or leaf.of_gradients)

    def drop_room(self) -> None:
        """Free the second copies, between two steps; the next step makes them anew."""
        for leaf in self.flat:
            leaf.drop_room()

    @property
    def overwrites(self) -> bool:
        """True if the step that is under way has written over anything from before it."""
        return not self.blank and any(leaf.overwritten for leaf in self.flat)

    @property
    def in_place(self) -> bool:
        """True if steps write over anything."""
        return any(not leaf.versioned for leaf in self.flat)

    @property
    def nbytes(self) -> int:
        """Bytes of all numbers, each once."""
        return sum(leaf.flat.nbytes for leaf in self.flat)

    def set_step(self, step: int) -> None:
        """Set every counter."""
        for counter in self.counters:
            counter.value = step

    def undo(self) -> bool:
        """Go on from the numbers before the step that is under way. Return True if any were set to zero instead."""
        lost = [leaf.undo() for leaf in self.flat]
        return any(lost) and not self.blank

    def end_step(self, *, keep: bool) -> bool:
        """Keep the step that is under way, or undo it. Return True if numbers from before it were set to zero."""
        if not keep:
            return self.undo()
        self.blank = False
        for leaf in self.flat:
            leaf.keep()
        return False

    def snapshot(self, *, newest: bool = False, undone: bool = False) -> Leaves:
        """The leaves as they were before the step that is under way, or the `newest`, to be saved by and by.

        `undone`: see `Leaf.snapshot`.
        """
        snapshot = copy.copy(self)
        snapshot._by_path = {path: leaf.snapshot(newest=newest, undone=undone) for path, leaf in self._by_path.items()}
        return snapshot

    def save(self) -> Entries:
        """Copies of all numbers, by parameter name and field."""
        return _saved(self._by_path.items())

    def load(self, entries: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Fill in saved entries; returns what the next gradients must make up for, flat, by parameter name."""
        self.blank = self.blank and not entries
        return summed(self._loaded(path, leaf, entries) for path, leaf in self._by_path.items())

    def _loaded(self, path: str, leaf: Leaf, entries: Mapping[str, Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        share = self._shares.get(path)
        if share is not None and isinstance(leaf, PerParameter | Chunk):
            return share.load(leaf, path, entries)
        return leaf.load(path, entries)  # by the share's own names

    def held_back(self) -> dict[str, Tensor]:
        """Return what would be lost if the state were dropped, flat, by parameter name."""
        return summed(self._held_back(path, leaf) for path, leaf in self._by_path.items())

    def _held_back(self, path: str, leaf: Leaf) -> Mapping[str, Tensor]:
        held, share = leaf.held_back(), self._shares.get(path)
        return share.of_whole(held) if share else held

    def rescale(self, factor: float) -> None:
        """Multiply what is made of gradients, held back or not, between two steps: their units have changed."""
        for leaf in self.flat:
            if leaf.holds_back or leaf.of_gradients:
                leaf.multiply(factor)

    def averaged(self) -> Entries:
        """Copies of what is made of this rank's gradients and not held back: a resize goes on with the mean over ranks."""
        return _saved((path, leaf) for path, leaf in self._by_path.items() if leaf.of_gradients)

    def damp(self, factor: float) -> None:
        """Multiply what is held back, as a part of the step."""
        for leaf in self.residuals:
            if not leaf.cleared:
                leaf.damp(factor)

    @property
    def hold_back(self) -> bool:
        """True if anything may be held back that was not released."""
        return any(not leaf.cleared for leaf in self.residuals)

    def hold(self, layout: Layout, numbers: Tensor) -> None:
        """Hold back these, too, flat, of this rank's gradient, in the step; what has no leaf stays in `numbers`."""
        views = layout.views(numbers)
        for path, leaf in self._by_path.items():
            if not isinstance(leaf, PerParameter) or not leaf.residual or path in self._shares:
                continue
            step = leaf.open()
            held = leaf.layout.views(step.in_place())
            for name in held.keys() & views.keys():
                held[name].add_(views[name])
                views[name].zero_()
            leaf.close(step)

    def release(self, layout: Layout, flat: Tensor) -> None:
        """Move what is held back into `flat`, this rank's gradient or residual, as a part of the step."""
        views = layout.views(flat)
        for path, leaf in self._by_path.items():
            if isinstance(leaf, FlatLeaf) and leaf.holds_back:
                for name, numbers in self._held_back(path, leaf).items():
                    views[name].view(-1).add_(numbers)
                leaf.clear()


def _saved(found: Iterable[tuple[str, Leaf]]) -> Entries:
    entries: Entries = {}
    for path, leaf in found:
        for name, fields in leaf.save(path).items():
            entries.setdefault(name, {}).update(fields)
    return entries


def save(state: Any) -> Entries:
    """Copies of a state's numbers, by parameter name and field."""
    return Leaves(state).save()


def load(state: Any, entries: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Fill a state from saved entries; returns what the next gradients must make up for, flat, by parameter name."""
    return Leaves(state).load(entries)


def held_back(state: Any) -> dict[str, Tensor]:
    """Return the residuals of a state: numbers that would be lost if the state were dropped.

    Args:
        state: the state of a compressor on one bucket.

    Returns:
        {parameter name: flat tensor}
    """
    return Leaves(state).held_back()


def set_step(state: Any, step: int) -> None:
    """Set every counter of a state."""
    Leaves(state).set_step(step)


def summed(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The sums, by parameter name; copies."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, numbers in part.items():
            total[name] = total[name] + numbers if name in total else numbers.clone()
    return total
