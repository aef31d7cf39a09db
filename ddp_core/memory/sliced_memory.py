"""The memory of a compressor for a bucket that may be sent in slices. It is saved as that of the whole bucket."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...compress.protocol.compressor import Compressor, traits_of
from ...compress.protocol.layout import Layout, Ranks
from ...compress.state.shares import ranks_given
from ...compress.state.tensors import FIRST, PART
from ...compress.state.tree import Chunk, Entries, Leaves, leaves
from .bucket_memory import CARRIED_OVER, BucketMemory


def may_be_cut(compressor: Compressor) -> bool:
    """Return True if gradients may be cut anywhere, inside of parameters too: nothing is remembered, or all of it was
    held back of single numbers. Factors are of whole matrices, and what ranks agree on is of whole buckets.
    """
    several_hosts = Ranks(2 * (ranks_given(compressor) or 1))
    matrix = Layout(("weight",), ((64, 64),), torch.float32, torch.device("cpu"), several_hosts)
    remembered = Leaves(compressor.init(matrix)).flat
    of_numbers = traits_of(compressor).ignores_shapes and ranks_given(compressor) is None
    return not remembered or (of_numbers and all(leaf.holds_back for leaf in remembered))


class SlicedMemory:
    """The memory of a bucket of `layout`, by `slices`: of those that `cuts` are the layouts of, or of all of it as one.

    What is saved is of whole parameters, however they are cut, and loads into any slices. Of what servers hold back it has
    zeros where other ranks serve; in slices that this rank serves other parts of, it is carried to the next average.
    """

    def __init__(
        self,
        compressor: Compressor,
        layout: Layout,
        cuts: Sequence[Layout],
        step: int,
        *,
        partial: bool = False,
        any_rank_owes: bool = False,
        undo: bool = True,
    ) -> None:
        self.layout, self.cuts = layout, tuple(cuts)
        options = {"partial": partial, "any_rank_owes": any_rank_owes, "undo": undo}
        self.slices = [BucketMemory(compressor, each, step, **options) for each in self.cuts or (layout,)]

    def held_back(self) -> dict[str, Tensor]:
        """Return the gradient that this rank has not given to an average yet, flat, by parameter."""
        total: dict[str, Tensor] = {}
        for each in self.slices:
            for name, numbers in each.held_back().items():
                place = _place(each.layout, name)
                total.setdefault(name, numbers.new_zeros(self._size(name)))[place] = numbers
        return total

    def _size(self, name: str) -> int:
        return self.layout.sizes[self.layout.names.index(name)]

    def snapshot(self, *, keep: bool, undone: bool, any_rank_owes: bool) -> SlicedMemory:
        """The memory before the last step, or with `keep` after it, to be saved by and by: see `BucketMemory.snapshot`."""
        snapshot = copy.copy(self)
        snapshot.slices = [each.snapshot(keep=keep, undone=undone, any_rank_owes=any_rank_owes) for each in self.slices]
        return snapshot

    def carry_over(self, held_back: Mapping[str, Tensor]) -> None:
        """Add to the next gradients, flat, by parameter name."""
        for each in self.slices:
            mine = held_back.keys() & each.layout.names
            each.carry_over({name: held_back[name][_place(each.layout, name)] for name in mine})

    def save(self) -> Entries:
        """Copies of all numbers, by parameter name and field."""
        if not self.cuts:
            return self.slices[0].save()
        entries: Entries = {}
        for each in self.slices:
            for name, fields in each.save().items():
                self._join(entries.setdefault(name, {}), name, fields, _place(each.layout, name).start)
        return entries

    def _join(self, whole: dict[str, Tensor], name: str, fields: Mapping[str, Tensor], start: int) -> None:
        """Put what was saved of the part of a parameter that begins with element `start` into what is of all of it."""
        for key in (key for key in fields if not key.endswith(FIRST)):
            field, numbers, first = key.partition(PART)[0], fields[key], fields.get(f"{key}{FIRST}")
            if field not in whole:
                by_shape = first is None and field != CARRIED_OVER
                shape = self.layout.shapes[self.layout.names.index(name)] if by_shape else (self._size(name),)
                whole[field] = numbers.new_zeros(shape)
            if first is not None:
                whole[f"{field}{FIRST}"] = torch.tensor(0, device="cpu")
            begin = start + int(first or 0)
            whole[field].view(-1)[begin : begin + numbers.numel()] = numbers.view(-1)

    def load(self, entries: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take saved numbers; those that lost their place are carried to the next average."""
        if not self.cuts:
            return self.slices[0].load(entries)
        for each in self.slices:
            each.load({name: _cut_out(each, name, entries[name]) for name in each.layout.names if name in entries})


def _place(cut: Layout, name: str) -> slice:
    """The elements of a parameter that lie in a slice."""
    first = cut.start(name) or 0
    return slice(first, first + cut.sizes[cut.names.index(name)])


def _cut_out(memory: BucketMemory, name: str, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a slice takes of the saved fields of a parameter."""
    servers = [key for key in fields if f"{key}{FIRST}" in fields]
    found = {
        key: fields[key] for key in fields if key not in servers and key != CARRIED_OVER and not key.endswith(FIRST)
    }
    carried = [fields[CARRIED_OVER][_place(memory.layout, name)]] if CARRIED_OVER in fields else []
    for key in servers:
        here, moved = _served(memory, name, key, fields)
        found |= here
        carried += [moved] if moved.any() else []
    return found | ({CARRIED_OVER: sum(carried[1:], carried[0])} if carried else {})


def _served(
    memory: BucketMemory, name: str, key: str, fields: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    """Return what this rank held back as a server: of numbers that it serves now, too, and of others, to carry over."""
    place, first, saved = _place(memory.layout, name), int(fields[f"{key}{FIRST}"]), fields[key]
    begin = max(first, place.start)
    end = max(begin, min(first + saved.numel(), place.stop))
    moved = saved.new_zeros(place.stop - place.start)
    moved[begin - place.start : end - place.start] = saved[begin - first : end - first]
    here: dict[str, Tensor] = {}
    for at, size in _serves(memory, name, key):
        if begin <= place.start + at and place.start + at + size <= end:
            part = f"{key}{PART}{place.start}"
            here = {part: moved[at : at + size].clone(), f"{part}{FIRST}": torch.tensor(at, device="cpu")}
            moved[at : at + size] = 0
    return here, moved.mul_(memory.layout.ranks.world_size)


def _serves(memory: BucketMemory, name: str, key: str) -> Iterator[tuple[int, int]]:
    """First number of the slice's part of a parameter that this rank serves, and how many."""
    for path, leaf in leaves(memory.state):
        if path == key and isinstance(leaf, Chunk):
            yield from ((first, numbers.numel()) for found, first, numbers in leaf.pieces() if found == name)
