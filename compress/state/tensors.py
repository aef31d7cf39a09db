"""Parts of a compressor's state: flat tensors cut by parameter name, parts of a bucket, step counts."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ...kernels import Residual
from ..protocol.layout import Layout
from .narrow import WIDTHS, Narrow

Entries = dict[str, dict[str, Tensor]]  # {parameter name: {field: tensor}}
Self = TypeVar("Self", bound="Leaf")
Numbers = TypeVar("Numbers", bound="FlatLeaf")
PART = "@"  # `residual@100`: the residual of a part of a parameter that begins with its element 100
FIRST = ".first"  # ends the field that tells where in a parameter, or a part of it, a server's numbers begin


class Leaf:
    """A piece of state that knows which parameter each of its numbers belongs to."""

    of_gradients: bool = False  # made of this rank's gradients: in their units, and other ranks have others

    def save(self, field: str) -> Entries:
        """Copies of the numbers, by parameter name."""
        return {}

    def snapshot(self: Self, *, newest: bool = False) -> Self:
        """The leaf before the step that is under way, or the `newest`, to be saved by and by: nobody will write to it."""
        return copy.copy(self)

    def load(self, field: str, entries: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Take the numbers back; what has no place here but must not be lost is returned, flat, by parameter."""
        return {}

    def held_back(self) -> dict[str, Tensor]:
        """Return what this rank still owes to the average, flat, by parameter: to be added to its next gradient."""
        return {}


@dataclass
class Counter(Leaf):
    """The number of synchronized steps, `value`. It is saved once for the whole model, not per parameter."""

    value: int = 0


class FlatLeaf(Leaf):
    """Numbers in a flat tensor: `flat` holds the newest, `before` those from before the step that is under way.

    A step asks `update` where to read and where to write. These are one tensor, unless the leaf is `versioned`: then the new
    numbers are written beside the old ones. The step can be taken back (`undo`) or let stand (`keep`) at no cost, and
    another thread can take the old numbers while the step goes on. Without, a step that is taken back leaves zeros.

    With a `store` the tensor has the numbers in fewer bits: a step then works on copies, from `open` to `close`.
    """

    flat: Tensor
    store: Narrow | None = None
    versioned = False
    _other: Tensor | None = None  # the old numbers while a step is under way, else room for the next ones
    _changed = False  # by the step that is under way
    _taken: tuple[Tensor, ...] = ()  # those of `flat` and `_other` that somebody has: nobody may write to them again
    _zeros: Tensor | None = None  # the version that `clear` wrote, as long as nobody writes to it again

    def update(self) -> Residual:
        """Return where this step reads, and where it writes all the numbers anew; afterwards both are what it wrote."""
        self._zeros = None
        if self._changed:
            return Residual(self.flat, self.flat)
        if not self.versioned:
            self._changed = True  # first: a snapshot that takes the numbers looks at this afterwards
            if not self._has_taken(self.flat):
                return Residual(self.flat, self.flat)
        before, after = self.flat, self._other
        if after is None or self._has_taken(after):
            after = torch.empty_like(before)
        self._other = before
        self._changed = True
        self.flat = after  # last: whoever reads `before` meanwhile finds the old numbers
        return Residual(before, after)

    def open(self) -> Residual:
        """Return where this step reads numbers, and where it writes them; they stand once `close` is given it."""
        step = self.update()
        if self.store is None:
            return step
        numbers = self.store.unpacked(step.before)
        return Residual(numbers, numbers)

    def close(self, step: Residual) -> None:
        """Keep what a step has written, of `open`."""
        if self.store is not None:
            self.store.pack(step.after, self.flat)

    def wide(self) -> Tensor:
        """Return all numbers, flat: copies with a `store`, else the leaf's own memory."""
        return self.flat if self.store is None else self.store.unpacked(self.flat)

    def set(self, numbers: Tensor) -> None:
        """Take these numbers, between two steps."""
        self._zeros = None
        if self.store is None:
            if numbers is not self.flat:
                self.flat.copy_(numbers)
        else:
            self.store.pack(numbers, self.flat)

    @property
    def numel(self) -> int:
        """Elements."""
        return self.flat.numel() if self.store is None else self.store.rows * self.store.numel

    @property
    def dtype(self) -> torch.dtype:
        """The type of the numbers in arithmetic."""
        return self.flat.dtype if self.store is None else self.store.dtype

    def _has_taken(self, numbers: Tensor) -> bool:
        """Return True if a snapshot has these."""
        return any(numbers is tensor for tensor in self._taken)

    @property
    def before(self) -> Tensor:
        """The numbers from before the step that is under way; the newest where it has not changed them."""
        newest = self.flat  # first: see `update`
        return self._other if self._changed and self._other is not None else newest

    @property
    def overwritten(self) -> bool:
        """True if the step that is under way has written over the numbers from before it."""
        return self._changed and self._other is None

    def make_room(self) -> None:
        """Have steps be versioned from now on; the memory for that is allocated now. Between two steps."""
        if not self.versioned:
            self.versioned, self._other = True, torch.empty_like(self.flat)

    def keep(self) -> None:
        """Let the step stand."""
        self._changed = False
        self._other = self._other if self.versioned else None
        self._taken = tuple(tensor for tensor in self._taken if tensor is self.flat or tensor is self._other)

    def undo(self) -> None:
        """Take the step back; where it has written over the old numbers, to zeros."""
        if self.overwritten:
            self.flat = torch.zeros_like(self.flat)  # another tensor: a snapshot may have this one
        else:
            self.flat, self._other = self.before, self.flat if self._changed else self._other
        self.keep()

    def snapshot(self: Numbers, *, newest: bool = False) -> Numbers:
        numbers = self.flat if newest else self.before
        self._taken = (*self._taken, numbers)
        if self.overwritten and not newest:
            numbers = torch.zeros_like(numbers)
        snapshot = copy.copy(self)
        snapshot.flat, snapshot._other, snapshot._changed, snapshot._taken = numbers, None, False, ()
        if snapshot.flat.is_cuda:  # its memory serves nobody else until this thread's stream has read it
            snapshot.flat.record_stream(torch.cuda.current_stream(snapshot.flat.device))
        return snapshot

    def multiply(self, factor: float) -> None:
        """Multiply all numbers, between two steps."""
        cleared, before = self.cleared, self.flat
        self.flat = torch.empty_like(before)
        self._scale(before, factor, self.flat)
        self._zeros = self.flat if cleared else None

    def _scale(self, before: Tensor, factor: float, after: Tensor) -> None:
        if self.store is None:
            torch.mul(before, factor, out=after)
        else:
            self.store.multiply(before, factor, after)

    def clear(self) -> None:
        """Set all numbers to zero, as a part of the step."""
        zeros = self.update().after.zero_()
        self._zeros = zeros

    def damp(self, factor: float) -> None:
        """Multiply all numbers, as a part of the step."""
        before, after = self.update()
        self._scale(before, factor, after)

    @property
    def cleared(self) -> bool:
        """True if nothing was written since `clear`."""
        return self._zeros is self.flat

    @property
    def holds_back(self) -> bool:
        """True if these are residuals, which must never be lost."""
        return True

    @property
    def weight(self) -> int:
        """The times that a number held back here is missing from the gradient of one rank."""
        return 1

    def pieces(self, flat: Tensor | None = None) -> Iterator[tuple[str, int, Tensor]]:
        """(parameter, first element within it, numbers) of every parameter that this leaf has numbers of.

        `flat`: the numbers, as of `wide()`.
        """
        raise NotImplementedError


@dataclass
class PerParameter(FlatLeaf):
    """A state tensor that knows its parameters, so that it survives new buckets and checkpoints.

    Attributes:
        layout: the parameters.
        flat: their numbers, flat.
        residual: True marks a residual, which must never be lost.
        optional: True lets the tensor start anew if a saved one does not fit.
        of_gradients: True marks other numbers made of this rank's gradients.
        store: the numbers in fewer bits, if `zeros` was asked for that.
    """

    layout: Layout
    flat: Tensor
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
        flat, store = zeros(layout.numel, layout.dtype, layout.device, bits)
        return cls(layout, flat, store=store, **flags)

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
    flat: Tensor
    store: Narrow | None = None

    @classmethod
    def zeros(cls, layout: Layout, start: int, end: int, bits: int = WIDTHS[0]) -> Chunk:
        """Zeros for elements `start` to `end`, kept in so many `bits`."""
        wide = layout.widened()
        return cls(layout, start, *zeros(end - start, wide.dtype, wide.device, bits))

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
    numel: int, dtype: torch.dtype, device: torch.device, bits: int, rows: int = 1
) -> tuple[Tensor, Narrow | None]:
    """Zeros for `rows` times so many numbers, and their store; None for numbers as they are in arithmetic."""
    if bits == WIDTHS[0]:
        return torch.zeros(rows * numel, dtype=dtype, device=device), None
    store = Narrow(bits, numel, dtype, rows)
    return store.zeros(device), store


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
