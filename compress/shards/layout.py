"""The places of sharded parameters in a flat buffer."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from ..protocol.layout import Layout


@dataclass(frozen=True)
class ShardLayout:
    """The places of sharded parameters in a flat buffer: a row per rank, and in it that rank's shard of each.

    `whole`: the parameters as they are before they are cut. `dims`: the axis along which each is; shards that come out
    shorter are padded with zeros. Where its ranks are `per_host` to a host, the buffer has the rows of the ranks of this
    rank's place on all hosts.

    >>> from gradwire.compress import Ranks
    >>> whole = Layout(("bias", "weight"), ((3,), (2, 3)), torch.float32, torch.device("cpu"), Ranks(2))
    >>> layout = ShardLayout(whole, (0, 0))
    >>> layout.shapes, layout.row
    (((2,), (1, 3)), 5)
    """

    whole: Layout
    dims: tuple[int, ...]

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shard of each parameter, padding included."""
        return tuple(
            (*shape[:dim], -(-shape[dim] // self.whole.ranks.world_size), *shape[dim + 1 :])
            for shape, dim in zip(self.whole.shapes, self.dims, strict=True)
        )

    @cached_property
    def row(self) -> int:
        """Elements of a rank's row."""
        return sum(map(prod, self.shapes))

    @cached_property
    def spans(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """First element and number of elements of each shard in each row of the buffer, without its padding."""
        of_ranks: list[list[tuple[int, int]]] = [[] for _ in self.rows]
        first = 0
        for whole, shape, dim in zip(self.whole.shapes, self.shapes, self.dims, strict=True):
            size, across = prod(shape), 1 if dim else prod(shape[1:])
            for spans, rank in zip(of_ranks, self.rows, strict=True):
                here = size if dim else across * max(0, min(shape[0], whole[0] - rank * shape[0]))
                spans.append((first, here))
            first += size
        return tuple(map(tuple, of_ranks))

    @cached_property
    def unnamed(self) -> bool:
        """True for a gradient as one parameter without a name, of which nobody knows what parameters it is of."""
        return self.whole.names == ("",)

    @cached_property
    def rows(self) -> range:
        """The ranks whose rows are in the buffer."""
        return self.whole.ranks.members("across")

    @cached_property
    def numel(self) -> int:
        """Elements of all rows."""
        return self.row * len(self.rows)

    def on_hosts(self, per_host: int) -> ShardLayout:
        """Return the layout of the rows of this rank's place on hosts of so many ranks; with 1, of all rows."""
        if self.whole.ranks.per_host == per_host:
            return self
        ranks = dataclasses.replace(self.whole.ranks, per_host=per_host)
        return dataclasses.replace(self, whole=dataclasses.replace(self.whole, ranks=ranks))

    def spread(self, flat: Tensor) -> Tensor:
        """Return the rows of all ranks, with zeros where the buffer has none; the buffer itself where it has all."""
        ranks = self.whole.ranks.world_size
        if len(self.rows) == ranks:
            return flat
        every = flat.new_zeros(ranks, self.row)
        every[self.rows.start :: self.rows.step] = flat.view(-1, self.row)
        return every.view(-1)

    def kept(self, every: Tensor) -> Tensor:
        """Return the rows of the buffer, given those of all ranks."""
        if len(self.rows) == self.whole.ranks.world_size:
            return every
        return every.view(-1, self.row)[self.rows.start :: self.rows.step].reshape(-1)

    def parts(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, its shards (rows, *shape)) of every parameter, sharing memory with `flat`."""
        columns = flat.view(len(self.rows), self.row).split([prod(shape) for shape in self.shapes], 1)
        for name, shape, column in zip(self.whole.names, self.shapes, columns, strict=True):
            yield name, column.unflatten(1, shape)

    @cached_property
    def padding(self) -> tuple[tuple[str, int, int, int], ...]:
        """(parameter, axis, first rank, first index of its shard) of what fills up shards that come out shorter."""
        sizes = (
            (name, dim, shape[dim])
            for name, shape, dim in zip(self.whole.names, self.whole.shapes, self.dims, strict=True)
        )
        cut = (
            (name, dim, *divmod(size, shard[dim])) for (name, dim, size), shard in zip(sizes, self.shapes, strict=True)
        )
        return tuple(each for each in cut if each[2] < self.whole.ranks.world_size)

    def clear_padding(self, flat: Tensor) -> None:
        """Put zeros where rows have numbers of no parameter."""
        shards = dict(self.parts(flat))
        for name, dim, rank, first in self.padding:
            behind = bisect_right(self.rows, rank)
            shards[name][behind:].zero_()
            if rank in self.rows:
                last = shards[name][behind - 1]
                last.narrow(dim, first, last.shape[dim] - first).zero_()

    def joined(self, flat: Tensor) -> dict[str, Tensor]:
        """Copies of the parameters as they are before they are cut, with zeros from rows that the buffer has not."""
        joined, every = {}, self.on_hosts(1)
        for (name, shards), shape, dim in zip(
            every.parts(self.spread(flat)), self.whole.shapes, self.dims, strict=True
        ):
            joined[name] = torch.cat(shards.unbind(), dim).narrow(dim, 0, shape[dim]).clone()
        return joined

    def cut(self, name: str, whole: Tensor, flat: Tensor) -> None:
        """Put a whole parameter into its places in `flat`, which has the rows of all ranks."""
        place = self.whole.names.index(name)
        dim, shards = self.dims[place], dict(self.on_hosts(1).parts(flat))[name]
        first = 0
        for shard in shards:
            size = min(shard.shape[dim], whole.shape[dim] - first)
            if size > 0:
                shard.narrow(dim, 0, size).copy_(whole.narrow(dim, first, size))
            first += shard.shape[dim]
