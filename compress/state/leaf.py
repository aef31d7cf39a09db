"""Numbers of a compressor's state, in versions: a step that changes them can be undone, and another thread can save."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ... import kernels
from ...kernels import Places, Residual
from ...kernels.operands import in_blocks
from ..protocol.block_tables import blocks_of, count_blocks, in_order, places_of, spans_of

Entries = dict[str, dict[str, Tensor]]  # {parameter name: {field: tensor}}
Self = TypeVar("Self", bound="Leaf")
Numbers = TypeVar("Numbers", bound="FlatLeaf")
_taking = threading.Lock()  # while a snapshot takes numbers, or a step decides to write over them
WIDTHS = (32, 16, 8)  # bits of a residual's element; 32: as wide as arithmetic is
BLOCK = 128  # elements that share a scale


@dataclass(frozen=True)
class Narrow:
    """The form of `rows` rows of parameters of `sizes`, each row in memory of its own: LoCo's (Xie et al. 2024).

    In 8 `bits` an element is a multiple of the scale of its block: at most half a 127th of the block's largest magnitude is
    rounded off. Each parameter begins with a block. In 16 it is a bfloat16: at most a 256th of itself is. Zero is zero in
    both.
    """

    bits: int
    sizes: tuple[int, ...]
    dtype: torch.dtype
    rows: int = 1

    @cached_property
    def numel(self) -> int:
        """Elements of a row."""
        return sum(self.sizes)

    @cached_property
    def blocks(self) -> int:
        """Blocks of a row."""
        return max(1, count_blocks(self.sizes, BLOCK))

    @cached_property
    def length(self) -> int:
        """Codes of a row."""
        return self.blocks * BLOCK if self.blocks > 1 else -(-self.numel // 8) * 8

    def zeros(self, device: torch.device) -> Tensor:
        """Return rows of zeros."""
        if self.bits == 16 or not self.numel:
            return torch.zeros(self.rows, self.numel, dtype=torch.bfloat16, device=device)
        return torch.zeros(self.rows, self.length + 4 * self.blocks, dtype=torch.uint8, device=device)

    def _parts(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the scales and the codes of some rows."""
        return row[:, self.length :].view(torch.float32), row[:, : self.length].view(torch.int8)

    def unpacked(self, packed: Tensor) -> Tensor:
        """Return copies of the numbers of all rows, flat."""
        numbers = kernels.temporary((self.rows * self.numel,), dtype=self.dtype, device=packed.device)
        if packed.dtype == torch.bfloat16:
            numbers.view(self.rows, self.numel).copy_(packed)
            return numbers
        scales, codes = self._parts(packed)
        kernels.dequantize_mean(scales.unsqueeze(0), codes.unsqueeze(0), numbers, places=_places(self, packed.device))
        return numbers

    def pack(self, numbers: Tensor, packed: Tensor) -> None:
        """Write the flat numbers of all rows."""
        if packed.dtype == torch.bfloat16:
            packed.copy_(numbers.view(self.rows, self.numel))
        else:
            places = _places(self, packed.device)
            kernels.quantize_blocks(numbers, None, *self._parts(packed), self.length, places=places)

    def pack_again(self, numbers: Tensor, packed: Tensor) -> None:
        """Write numbers that `unpacked` has returned: to the bit, unless the largest of a block was cleared since.

        The scale of a block that was multiplied may be the neighbour of a 127th of its largest magnitude.
        """
        self.pack(numbers, packed)
        if packed.dtype == torch.bfloat16:
            return
        scales, _ = self._parts(packed)
        found = scales.clone()
        for other in (found.nextafter(2 * found), found.nextafter(0 * found), found):
            scales.copy_(torch.where(self._differs(numbers, packed), other, scales))

    def _differs(self, numbers: Tensor, packed: Tensor) -> Tensor:
        """True for each block, (rows, blocks), whose numbers are not those that were packed."""
        differs, block = self.unpacked(packed) != numbers, self.length // self.blocks
        found = in_blocks(differs, self.rows * self.blocks, block, _places(self, packed.device))
        return found.any(1).view(self.rows, self.blocks)

    def elements(self, packed: Tensor) -> Tensor:
        """Return a view of the codes, each parameter's padded to whole blocks, or of bfloat16. It is flat for one row."""
        return (packed if packed.dtype == torch.bfloat16 else self._parts(packed)[1]).squeeze(0)

    def multiply(self, before: Tensor, factor: float, after: Tensor) -> None:
        """Write the numbers times a factor; `after` may be `before`. In 8 bits nothing is rounded anew but the scales."""
        if before.dtype == torch.bfloat16:
            torch.mul(before, factor, out=after)
            return
        if after is not before:
            after.copy_(before)
        self._parts(after)[0].mul_(factor)


@functools.lru_cache(maxsize=1024)  # a GPU would wait for new tables at each step
def _places(store: Narrow, device: torch.device) -> Places | None:
    """Return the places of blocks in the numbers; None if they lie one behind the other."""
    if in_order(store.sizes, BLOCK) and (store.rows == 1 or store.numel == store.length):
        return None
    table = functools.partial(blocks_of, spans_of(store.sizes), BLOCK)
    return places_of(store.blocks, table, device, store.rows, store.numel)


class Leaf:
    """A piece of state that knows which parameter each of its numbers belongs to."""

    of_gradients: bool = False  # made of this rank's gradients: in their units, and other ranks have others

    def save(self, field: str) -> Entries:
        """Copies of the numbers, by parameter name."""
        return {}

    def snapshot(self: Self, *, newest: bool = False, undone: bool = False) -> Self:
        """The leaf before the step that is under way, or the `newest`, to be saved by and by: nobody will write to it.

        `undone`: the step is over and does not count, so that the leaf is what `undo` will make of it.
        """
        return copy.copy(self)

    def load(self, field: str, entries: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Take the numbers back; what has no place here but must not be lost is returned, flat, by parameter."""
        return {}

    def held_back(self) -> dict[str, Tensor]:
        """Return what this rank still owes to the average, flat, by parameter: to be added to its next gradient."""
        return {}


class Versions(NamedTuple):
    """The numbers of a leaf, and those from before the step that is under way.

    One object, swapped in one assignment: a thread that saves reads it once and finds numbers that belong together.

    | the step that is under way             | current | previous |
    |----------------------------------------|---------|----------|
    | has not written, or there is none      | numbers | None     |
    | has written beside the numbers         | new     | old      |
    | has written over them: they are lost   | new     | current  |
    """

    current: Tensor
    previous: Tensor | None = None


class FlatLeaf(Leaf):
    """Numbers in a flat tensor: `flat` holds the newest, `before` those from before the step that is under way.

    A step asks `update` where to read and where to write. These are one tensor, unless the leaf is `versioned`: then the new
    numbers are written beside the old ones. The step can be taken back (`undo`) or let stand (`keep`) at no cost, and
    another thread can take the old numbers while the step goes on. Without, a step that is taken back leaves zeros.

    With a `store` the tensor has the numbers in fewer bits: a step then works on copies, from `open` to `close`.
    """

    versions: Versions
    store: Narrow | None = None
    versioned = False
    _room: Tensor | None = None  # memory for the next step's numbers
    _taken: tuple[Tensor, ...] = ()  # the numbers and the room that somebody has: nobody may write to them again
    _zeros: Tensor | None = None  # the version that `clear` wrote, as long as nobody writes to it again

    @property
    def flat(self) -> Tensor:
        """The newest numbers."""
        return self.versions.current

    def update(self) -> Residual:
        """Return where this step reads, and where it writes all the numbers anew; afterwards both are what it wrote."""
        self._zeros = None
        current, previous = self.versions
        if previous is not None:
            return Residual(current, current)
        with _taking:
            if not self.versioned and not (self._taken and self._has_taken(current)):
                self.versions = Versions(current, current)
                return Residual(current, current)
        after, self._room = self._room, None
        if after is None or (self._taken and self._has_taken(after)):
            after = torch.empty_like(current)
        self.versions = Versions(after, current)
        return Residual(current, after)

    def open(self) -> Residual:
        """Return where this step reads numbers, and where it writes them; they stand once `close` is given it."""
        step = self.update()
        if self.store is None:
            return step
        numbers = self.store.unpacked(step.before)
        return Residual(numbers, numbers)

    def close(self, step: Residual) -> None:
        """Keep what a step has written, of `open`. Copies are freed: `step.after` is then `stored`, and may get zeros."""
        if self.store is not None:
            self.store.pack(step.after, self.versions.current)
            step.after.data = self.stored  # other frames have this tensor, too

    def wide(self) -> Tensor:
        """Return all numbers, flat: copies with a `store`, else the leaf's own memory."""
        return self.flat if self.store is None else self.store.unpacked(self.flat)

    @property
    def stored(self) -> Tensor:
        """The leaf's own memory: with a `store`, bfloat16 or codes, see `Narrow.elements`. Zeros are zeros in it."""
        return self.flat if self.store is None else self.store.elements(self.flat)

    def set(self, numbers: Tensor) -> None:
        """Take these numbers, between two steps."""
        self._zeros = None
        if self.store is None:
            if numbers is not self.flat:
                self.flat.copy_(numbers)
        else:
            self.store.pack_again(numbers, self.flat)

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
        current, previous = self.versions
        return current if previous is None else previous

    @property
    def overwritten(self) -> bool:
        """True if the step that is under way has written over the numbers from before it."""
        current, previous = self.versions
        return previous is current

    def drop_room(self) -> None:
        """Free the memory for the next step's numbers, between two steps; that step allocates it anew."""
        self._room = None

    def keep(self) -> None:
        """Let the step stand; with `versioned` the old numbers are room for the next ones."""
        current, previous = self.versions
        if not self.versioned:
            self._room = None
        elif previous is not None and previous is not current:
            self._room = previous
        self.versions = Versions(current)
        if self._taken:
            self._taken = tuple(tensor for tensor in self._taken if tensor is current or tensor is self._room)

    def undo(self) -> bool:
        """Take the step back. Return True if that is to zeros: without `versioned`, where it has changed the numbers.

        The old ones may still be there, since a snapshot has them. But a save must not change what training does: other
        ranks, which have not saved, have zeros.
        """
        current, previous = self.versions
        if previous is None:
            return False
        if previous is not current:
            self._room = current
        lost = not self.versioned
        # a snapshot may have the present ones
        self.versions = Versions(torch.zeros_like(current) if lost else previous)
        self.keep()
        return lost

    def snapshot(self: Numbers, *, newest: bool = False, undone: bool = False) -> Numbers:
        with _taking:
            current, previous = self.versions
            numbers = current if newest or previous is None else previous
            from_before = not newest and previous is not None  # and the step has changed them
            gone = not self.versioned if undone else previous is current  # by `undo`, or by the step itself
            self._taken = (*self._taken, numbers)
        if from_before and gone:
            numbers = torch.zeros_like(numbers)
        snapshot = copy.copy(self)
        snapshot.versions, snapshot._room, snapshot._taken = Versions(numbers), None, ()
        if numbers.is_cuda:  # its memory serves nobody else until this thread's stream has read it
            numbers.record_stream(torch.cuda.current_stream(numbers.device))
        return snapshot

    def multiply(self, factor: float) -> None:
        """Multiply all numbers, between two steps."""
        cleared, before = self.cleared, self.flat
        after = torch.empty_like(before)
        self._scale(before, factor, after)
        self.versions = Versions(after)
        self._zeros = after if cleared else None

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
        return self._zeros is self.versions.current

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
