"""Parts of a compressor's state: flat tensors cut by parameter name, parts of a bucket, step counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..protocol.block_tables import sizes_within
from ..protocol.layout import Layout
from .leaf import WIDTHS, Entries, FlatLeaf, Leaf, Narrow, Versions

PART = "@"  # `residual@100`: the residual of a part of a parameter that begins with its element 100
FIRST = ".first"  # ends the field that tells where in a parameter, or a part of it, a server's numbers begin


@dataclass
class Counter(Leaf):
    """The number of synchronized steps, `value`. It is saved once for the whole model, not per parameter."""

    value: int = 0


@dataclass
class PerParameter(FlatLeaf):
    """A state tensor that knows its parameters, so that it survives new buckets and checkpoints.

    Attributes:
        layout: the parameters.
        versions: their numbers, flat, and those from before the step that is under way.
        residual: True marks a residual, which must never be lost.
        optional: True lets the tensor start anew if a saved one does not fit.
        of_gradients: True marks other numbers made of this rank's gradients.
        store: the numbers in fewer bits, if `zeros` was asked for that.
    """

    layout: Layout
    versions: Versions
    residual: bool = False
    optional: bool = False
    of_gradients: bool = False
    store: Narrow | None = None

    @classmethod
    def zeros(cls, layout: Layout, bits: int = WIDTHS[0], **flags: bool) -> PerParameter:
        """Return a leaf of zeros in the layout's dtype, on its device.

        Args:
            layout: the parameters.
            bits: bits per number: 32, 16 or 8.
            flags: `residual`, `optional` and `of_gradients`.

        Returns:
            The leaf.
        """
        versions, store = zeros(layout.sizes, layout.dtype, layout.device, bits)
        return cls(layout, versions, store=store, **flags)

    def pieces(self, flat: Tensor | None = None) -> Iterator[tuple[str, int, Tensor]]:
        for name, view in self.layout.views(self.wide() if flat is None else flat).items():
            yield name, 0, view.reshape(-1)

    def save(self, field: str) -> Entries:
        views = self.layout.views(self.wide())
        return {name: {_key(field, self.layout.start(name)): view.clone()} for name, view in views.items()}

    def load(self, field: str, entries: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Take the numbers back: of whole parameters or of parts of them, whichever were saved and are needed here."""
        numbers = self.wide()
        for name, view in self.layout.views(numbers).items():
            start = self.layout.start(name)
            for saved_start, saved in _saved(field, entries.get(name, {})):
                if saved_start == start and saved.shape == view.shape:
                    view.copy_(saved)
                elif _fits(view.numel(), start, saved.numel(), saved_start) and not self.optional:
                    _copy_overlap(view.view(-1), start or 0, saved.reshape(-1), saved_start or 0)
                elif not self.optional:
                    raise ValueError(
                        f"the saved {field!r} of parameter {name!r} has shape {tuple(saved.shape)}{_from(saved_start)}, but "
                        f"{tuple(view.shape)}{_from(start)} is needed here: load the state with the model and compressor "
                        f"that saved it"
                    )
        self.set(numbers)
        return {}

    @property
    def holds_back(self) -> bool:
        return self.residual

    def held_back(self) -> dict[str, Tensor]:
        if not self.residual:
            return {}
        return {name: numbers for name, _, numbers in self.pieces()}


@dataclass
class Chunk(FlatLeaf):
    """The residual of the part of a bucket that this rank serves: elements `start` to `start + len(flat)`.

    A server's residual is missing from the average itself, hence `world_size` times from the gradient of one rank.
    """

    layout: Layout
    start: int
    versions: Versions
    store: Narrow | None = None

    @classmethod
    def zeros(cls, layout: Layout, start: int, end: int, bits: int = WIDTHS[0]) -> Chunk:
        """Zeros for elements `start` to `end`, kept in so many `bits`."""
        wide, sizes = layout.widened(), sizes_within(layout.sizes, start, end)
        return cls(layout, start, *zeros(sizes, wide.dtype, wide.device, bits))

    @property
    def weight(self) -> int:
        return self.layout.ranks.world_size

    def pieces(self, flat: Tensor | None = None) -> Iterator[tuple[str, int, Tensor]]:
        flat = self.wide() if flat is None else flat
        end = self.start + flat.numel()
        for name, offset, size in zip(self.layout.names, self.layout.offsets, self.layout.sizes, strict=True):
            first, last = max(self.start, offset), min(end, offset + size)
            if first < last:
                yield name, first - offset, flat[first - self.start : last - self.start]

    def save(self, field: str) -> Entries:
        entries: Entries = {}
        for name, first, piece in self.pieces():
            key = _key(field, self.layout.start(name))
            entries[name] = {key: piece.clone(), f"{key}{FIRST}": torch.tensor(first, device="cpu")}
        return entries

    def load(self, field: str, entries: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        own = self.wide()
        mine = {name: (first, piece) for name, first, piece in self.pieces(own)}
        homeless: dict[str, Tensor] = {}
        for name in filter(entries.__contains__, self.layout.names):
            for start, saved in _saved(field, entries[name]):
                if start != (here := self.layout.start(name)):
                    raise ValueError(
                        f"the {field!r} of parameter {name!r} was saved{_from(start) or ' as a whole'}, and is needed "
                        f"here{_from(here) or ' as a whole'}: load the state with the shards that saved it"
                    )
                first, numbers = self._first(name, _key(field, start), entries[name]), saved.to(own)
                if name in mine and (first, numbers.numel()) == (mine[name][0], mine[name][1].numel()):
                    mine[name][1].copy_(numbers)
                else:
                    homeless[name] = self._carried(name, first, numbers)
        self.set(own)
        return homeless

    def _first(self, name: str, key: str, fields: Mapping[str, Tensor]) -> int:
        """The element of the parameter that the saved numbers begin with; ValueError where they do not lie inside of it."""
        first = fields.get(f"{key}{FIRST}")
        size = self.layout.sizes[self.layout.names.index(name)]
        if first is None or fields[key].dim() != 1 or not 0 <= int(first) <= size - fields[key].numel():
            raise ValueError(
                f"the saved {key!r} of parameter {name!r} has shape {tuple(fields[key].shape)} and begins at "
                f"{None if first is None else int(first)}: it is no part of a parameter of {size} elements"
            )
        return int(first)

    def held_back(self) -> dict[str, Tensor]:
        return {name: self._carried(name, first, piece) for name, first, piece in self.pieces()}

    def _carried(self, name: str, first: int, numbers: Tensor) -> Tensor:
        owed = numbers.new_zeros(self.layout.sizes[self.layout.names.index(name)])
        owed[first : first + numbers.numel()] = numbers * self.weight
        return owed


def zeros(
    sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device, bits: int, rows: int = 1
) -> tuple[Versions, Narrow | None]:
    """Zeros for `rows` times parameters of these sizes, and their store; None for numbers as they are in arithmetic."""
    if bits == WIDTHS[0]:
        return Versions(torch.zeros(rows * sum(sizes), dtype=dtype, device=device)), None
    store = Narrow(bits, sizes, dtype, rows)
    return Versions(store.zeros(device)), store


def _key(field: str, start: int | None) -> str:
    """The field under which the numbers of a whole parameter (None), or of a part of it, are saved."""
    return field if start is None else f"{field}{PART}{start}"


def _saved(field: str, fields: Mapping[str, Tensor]) -> Iterator[tuple[int | None, Tensor]]:
    """Yield what was saved of a field: (first element of the part; None for a whole parameter, numbers)."""
    for key, tensor in fields.items():
        name, _, start = key.rpartition(PART)
        if key == field:
            yield None, tensor
        elif name == field and start.isdigit():
            yield int(start), tensor


def _fits(size: int, start: int | None, saved_size: int, saved_start: int | None) -> bool:
    """Return True if two tensors that differ can be of one parameter: parts can, if they lie inside the whole."""
    if start is None:
        return saved_start is not None and saved_start + saved_size <= size
    return saved_start is not None or start + size <= saved_size


def _from(start: int | None) -> str:
    return "" if start is None else f" from element {start} on"


def _copy_overlap(flat: Tensor, start: int, saved: Tensor, saved_start: int) -> None:
    first, last = max(start, saved_start), min(start + flat.numel(), saved_start + saved.numel())
    if first < last:
        flat[first - start : last - start].copy_(saved[first - saved_start : last - saved_start])
