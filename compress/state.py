"""What compressors remember, kept by parameter name so that it survives new buckets, checkpoints and swaps.

A compressor's state is a dataclass whose fields are leaves of this module, states of inner compressors, or tuples of
those. The functions here walk that tree; no compressor writes code of its own for saving and loading.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from .protocol import Layout

Entries = dict[str, dict[str, Tensor]]  # {parameter name: {field: tensor}}


@runtime_checkable
class Leaf(Protocol):
    """A piece of state that knows which parameter each of its numbers belongs to."""

    def tensors(self) -> Iterator[Tensor]:
        """The tensors a step may change: what a rolled-back step restores."""

    def save(self, field: str) -> Entries:
        """Copies of the numbers, by parameter name."""

    def load(self, field: str, entries: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Take the numbers back; what has no place here but must not be lost is returned, flat, by parameter."""

    def held_back(self) -> dict[str, Tensor]:
        """What this rank still owes to the average, flat, by parameter: to be added to its next gradient."""


@dataclass
class PerParameter:
    """A flat tensor cut by parameter name.

    `residual` marks gradient that was held back, which must never be lost. A tensor that is not one may be drawn anew
    where a saved one does not fit (`optional`).
    """

    layout: Layout
    flat: Tensor
    residual: bool = False
    optional: bool = False

    @classmethod
    def zeros(cls, layout: Layout, **flags: bool) -> PerParameter:
        """Zeros in the layout's dtype, on its device."""
        return cls(layout, torch.zeros(layout.numel, dtype=layout.dtype, device=layout.device), **flags)

    def tensors(self) -> Iterator[Tensor]:
        yield self.flat

    def save(self, field: str) -> Entries:
        return {name: {field: view.clone()} for name, view in self.layout.views(self.flat).items()}

    def load(self, field: str, entries: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        for name, view in self.layout.views(self.flat).items():
            saved = entries.get(name, {}).get(field)
            if saved is not None and saved.shape == view.shape:
                view.copy_(saved)
            elif saved is not None and not self.optional:
                raise ValueError(
                    f"the saved {field!r} of parameter {name!r} has shape {tuple(saved.shape)}, but {tuple(view.shape)} "
                    f"is needed here: load the state with the model and compressor that saved it"
                )
        return {}

    def held_back(self) -> dict[str, Tensor]:
        if not self.residual:
            return {}
        return {name: view.reshape(-1) for name, view in self.layout.views(self.flat).items()}


@dataclass
class Chunk:
    """The residual of the part of a bucket that this rank serves: elements `start` to `start + len(flat)`.

    A server's residual is missing from the average itself, hence `world_size` times from the gradient of one rank.
    """

    layout: Layout
    start: int
    flat: Tensor

    def tensors(self) -> Iterator[Tensor]:
        yield self.flat

    def pieces(self) -> Iterator[tuple[str, int, Tensor]]:
        """(parameter, first element within it, numbers) of every parameter that this chunk touches."""
        end = self.start + self.flat.numel()
        for name, offset, size in zip(self.layout.names, self.layout.offsets, self.layout.sizes, strict=True):
            first, last = max(self.start, offset), min(end, offset + size)
            if first < last:
                yield name, first - offset, self.flat[first - self.start : last - self.start]

    def save(self, field: str) -> Entries:
        return {
            name: {field: piece.clone(), f"{field}.first": torch.tensor(first, device="cpu")}
            for name, first, piece in self.pieces()
        }

    def load(self, field: str, entries: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        mine = {name: (first, piece) for name, first, piece in self.pieces()}
        homeless: dict[str, Tensor] = {}
        for name, saved in entries.items():
            if field not in saved:
                continue
            first, numbers = int(saved[f"{field}.first"]), saved[field].to(self.flat)
            if name in mine and (first, numbers.numel()) == (mine[name][0], mine[name][1].numel()):
                mine[name][1].copy_(numbers)
            elif name in self.layout.names:
                homeless[name] = self._owed(name, first, numbers)
        return homeless

    def held_back(self) -> dict[str, Tensor]:
        return {name: self._owed(name, first, piece) for name, first, piece in self.pieces()}

    def _owed(self, name: str, first: int, numbers: Tensor) -> Tensor:
        owed = numbers.new_zeros(self.layout.sizes[self.layout.names.index(name)])
        owed[first : first + numbers.numel()] = numbers * self.layout.world_size
        return owed


@dataclass
class Counter:
    """Synced steps so far. Saved once for the whole model, not by parameter."""

    value: int = 0

    def tensors(self) -> Iterator[Tensor]:
        return iter(())

    def save(self, field: str) -> Entries:
        return {}

    def load(self, field: str, entries: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {}

    def held_back(self) -> dict[str, Tensor]:
        return {}


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """The leaves of a state and their paths, such as `inner.stages.1.q`."""
    if isinstance(state, Leaf):
        yield path, state
        return
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        parts = [(field.name, getattr(state, field.name)) for field in dataclasses.fields(state)]
    elif isinstance(state, tuple):
        parts = [(str(index), item) for index, item in enumerate(state)]
    else:
        return
    for name, part in parts:
        yield from leaves(part, f"{path}.{name}" if path else name)


def save(state: Any) -> Entries:
    """Copies of a state's numbers, by parameter name and field."""
    entries: Entries = {}
    for path, leaf in leaves(state):
        for name, fields in leaf.save(path).items():
            entries.setdefault(name, {}).update(fields)
    return entries


def load(state: Any, entries: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Fill a state from saved entries; returns what the next gradients must make up for, flat, by parameter name."""
    return summed(leaf.load(path, entries) for path, leaf in leaves(state))


def held_back(state: Any) -> dict[str, Tensor]:
    """What would be lost if this state were dropped, flat, by parameter name."""
    return summed(leaf.held_back() for _, leaf in leaves(state))


def release(state: Any, layout: Layout, flat: Tensor) -> None:
    """Move what a state holds back into `flat`, this rank's gradient or residual."""
    for _, leaf in leaves(state):
        if owed := leaf.held_back():
            views = layout.views(flat)
            for name, numbers in owed.items():
                views[name].view(-1).add_(numbers)
            for tensor in leaf.tensors():
                tensor.zero_()


def rescale(state: Any, factor: float) -> None:
    """Multiply what a state holds back."""
    for _, leaf in leaves(state):
        if leaf.held_back():
            for tensor in leaf.tensors():
                tensor.mul_(factor)


def summed(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The sums, by parameter name; copies."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, numbers in part.items():
            total[name] = total[name] + numbers if name in total else numbers.clone()
    return total


def counters(state: Any) -> Iterator[Counter]:
    """The step counters of a state."""
    return (leaf for _, leaf in leaves(state) if isinstance(leaf, Counter))


def set_step(state: Any, step: int) -> None:
    """Set every counter of a state."""
    for counter in counters(state):
        counter.value = step


def step_of(state: Any) -> int:
    """Synced steps that a state has seen; 0 where nothing counts."""
    return max((counter.value for counter in counters(state)), default=0)
