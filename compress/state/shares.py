"""The part of a bucket that each rank of a host averages with the other hosts."""

from __future__ import annotations

import dataclasses
import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..protocol.compressor import traits_of
from ..protocol.layout import Layout, Ranks
from .leaf import FlatLeaf
from .tensors import PART

LINE = 16  # elements: shares that are cut begin where a line of a processor's cache does


@dataclass(frozen=True)
class Share:
    """One of the consecutive parts that the ranks of a host make of a bucket, and what is held back of it.

    A rank's gradient counts for one of `per_host` in its host's mean. So what a share holds back is missing so many
    times from the gradient of one rank. `sizes`: elements of the ranks' shares.
    """

    whole: Layout
    sizes: tuple[int, ...]

    def at(self, place: int) -> Layout:
        """The share of the rank at a place: a layout of parts of parameters, whose ranks are the hosts."""
        end = sum(self.sizes[: place + 1])
        parts = list(self._parts(end - self.sizes[place], end))
        return dataclasses.replace(
            self.whole,
            names=tuple(name for name, _, _ in parts),
            shapes=tuple(shape for _, shape, _ in parts),
            starts=tuple(start for _, _, start in parts),
            row_sizes=tuple(self._rows[name] for name, _, _ in parts),
            ranks=Ranks(self.whole.ranks.hosts, self.whole.ranks.rank // self.whole.ranks.per_host),
        )

    def _parts(self, first: int, end: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """(name, shape, first element within the parameter) of what lies there of each parameter."""
        whole = self.whole
        places = zip(whole.names, whole.shapes, whole.offsets, whole.sizes, strict=True)
        for name, shape, offset, size in places:
            begin, stop = max(first, offset), min(end, offset + size)
            if begin < stop:
                yield name, shape if stop - begin == size else (stop - begin,), self._starts[name] + begin - offset

    @cached_property
    def _starts(self) -> dict[str, int]:
        starts = self.whole.starts or (0,) * len(self.whole.names)
        return dict(zip(self.whole.names, starts, strict=True))

    @cached_property
    def _rows(self) -> dict[str, int]:
        return dict(zip(self.whole.names, self.whole.rows, strict=True))

    @cached_property
    def _mine(self) -> Layout:
        return self.at(self.whole.ranks.place)

    def of_whole(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the residual of entries of this share, flat by parameter, as one rank's gradient lacks it."""
        owed: dict[str, Tensor] = {}
        for name, numbers in held.items():
            start = self._mine.start(name)
            assert start is not None
            self._owe(owed, name, start, numbers)
        return owed

    def _owe(self, owed: dict[str, Tensor], name: str, start: int, numbers: Tensor) -> None:
        size, first = self.whole.sizes[self.whole.names.index(name)], start - self._starts[name]
        if not 0 <= first <= size - numbers.numel():
            raise ValueError(
                f"{numbers.numel()} elements from {first} on were saved of parameter {name!r}, which has {size}: load the "
                f"state with the model that saved it"
            )
        whole = owed.setdefault(name, torch.zeros(size, dtype=numbers.dtype, device=numbers.device))
        whole[first : first + numbers.numel()].add_(numbers.reshape(-1), alpha=self.whole.ranks.per_host)

    def load(self, leaf: FlatLeaf, field: str, entries: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Take back what lies in this share as it did; what was held back elsewhere in the bucket is returned as owed."""
        flat = leaf.wide()
        here = {(name, self._mine.start(name), first): numbers for name, first, numbers in leaf.pieces(flat)}
        owed: dict[str, Tensor] = {}
        for name in filter(entries.__contains__, self.whole.names):
            for start, first, saved in _saved(field, entries[name]):
                mine = here.get((name, start, first))
                if leaf.holds_back:
                    self._check_shape(name, saved)
                if mine is not None and mine.numel() == saved.numel():
                    mine.copy_(saved.reshape(-1))
                elif leaf.holds_back:
                    self._owe(owed, name, start + first, saved.to(flat) * leaf.weight)
        leaf.set(flat)
        return owed

    def _check_shape(self, name: str, saved: Tensor) -> None:
        shape = self.whole.shapes[self.whole.names.index(name)]
        if saved.dim() > 1 and saved.shape != shape:
            raise ValueError(
                f"the saved state of parameter {name!r} has shape {tuple(saved.shape)}, the parameter {shape}: load the "
                f"state with the model that saved it"
            )


def _saved(field: str, fields: Mapping[str, Tensor]) -> Iterator[tuple[int, int, Tensor]]:
    """(first element of the part, first one within it, numbers) of all that was saved of a field."""
    for key, saved in fields.items():
        name, _, start = key.rpartition(PART)
        if name == field and start.isdigit():
            yield int(start), int(fields[f"{key}.first"]) if f"{key}.first" in fields else 0, saved


def share_of(layout: Layout, *, cut: bool) -> Share:
    """This rank's share of a bucket. `cut`: parameters may be cut, and shares are equal; else whole ones are dealt out."""
    return Share(layout, _equal(layout) if cut else _dealt(layout))


def _equal(layout: Layout) -> tuple[int, ...]:
    count = layout.ranks.per_host
    each = -(-layout.numel // (count * LINE)) * LINE
    return tuple(min(each, max(0, layout.numel - place * each)) for place in range(count))


def _dealt(layout: Layout) -> tuple[int, ...]:
    """Consecutive parameters for each rank, such that the largest share is as small as can be.

    Where there are fewer runs than ranks, the bucket's names tell whom they go to: the next bucket's go to others.
    """
    count, sizes = layout.ranks.per_host, layout.sizes
    enough = range(layout.numel + 1)
    room = bisect_left(enough, True, lo=max(sizes, default=0), key=lambda room: len(_runs(sizes, room)) <= count)
    runs = _runs(sizes, room)
    turn = int.from_bytes(hashlib.sha256(repr(layout.names).encode()).digest()[:4], "big")
    places = sorted((turn + index * count // max(1, len(runs))) % count for index in range(len(runs)))
    dealt = dict(zip(places, runs, strict=True))
    return tuple(dealt.get(place, 0) for place in range(count))


def _runs(sizes: Sequence[int], room: int) -> list[int]:
    """Sums of consecutive sizes, as few as can be without one above `room`.

    >>> _runs([3, 1, 2, 4], 4)
    [4, 2, 4]
    """
    runs: list[int] = []
    for size in filter(None, sizes):
        if runs and runs[-1] + size <= room:
            runs[-1] += size
        else:
            runs.append(size)
    return runs


def placed_on_hosts(compressor: Any, ranks: Ranks) -> Ranks:
    """Return the ranks on hosts of as many as a two-level compressor was given, if it was.

    Raises ValueError where that does not divide the number of ranks.
    """
    given = ranks_given(compressor)
    if given and ranks.world_size % given:
        raise ValueError(
            f"hosts:ranks={given} does not divide the {ranks.world_size} ranks: give the number of ranks of each host, or "
            "leave the option out, and gradwire finds it"
        )
    return dataclasses.replace(ranks, per_host=given) if given else ranks


def ranks_seen(compressor: Any, ranks: Ranks) -> Ranks:
    """Return the ranks on their hosts for a compressor of two levels, else each a host of its own."""
    return dataclasses.replace(ranks, per_host=1) if ranks_given(compressor) is None else ranks


def ranks_given(compressor: Any) -> int | None:
    """The ranks of a host that a two-level compressor, here or inside, was given; 0: to be found; None: it has one level."""
    return traits_of(compressor).ranks_per_host
