"""Which way a collective of a size goes: the one that wins a race between them on this network."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .wire import Wire

REPEATS = 3  # of which a way's fastest counts
CLASS = 4  # a race stands for sizes up to so many times the last
SMALLEST_RACE, LARGEST_RACE = 2**16, 2**24  # bytes of all ranks' blocks; what is larger goes the way of the largest
Kind: TypeAlias = Literal["all_gather", "reduce_scatter"]


class Way(Protocol):
    """How to do both. All tensors are flat, contiguous and of one size and type; it returns when they are there."""

    def all_gather(self, outputs: Sequence[Tensor], block: Tensor) -> None:
        """Write every rank's `block` to its output."""

    def reduce_scatter(self, output: Tensor, rows: Sequence[Tensor]) -> None:
        """Write to `output` the sum over ranks of the rows for this one; `rows` has one for each rank."""


class Ring:
    """Gloo's: blocks pass from rank to rank. Its reduce-scatter is an all-reduce, of which each rank takes a part."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def all_gather(self, outputs: Sequence[Tensor], block: Tensor) -> None:
        """As a `Way`."""
        self._wire.wait(self._wire.gloo.allgather([list(outputs)], [block]))

    def reduce_scatter(self, output: Tensor, rows: Sequence[Tensor]) -> None:
        """As a `Way`."""
        self._wire.wait(self._wire.gloo._reduce_scatter_base(output, torch.cat(list(rows))))


class Fastest:
    """Goes the way that has won the race for a size, which is held when that size is first asked for.

    `ways`: by name; the same on all ranks.
    """

    def __init__(self, wire: Wire, ways: Mapping[str, Way]) -> None:
        self._wire, self._ways = wire, ways
        self.chosen: dict[tuple[Kind, int], str] = {}  # by kind and the bytes of the race

    def all_gather(self, outputs: Sequence[Tensor], block: Tensor) -> None:
        """As a `Way`."""
        self._way("all_gather", block.nbytes).all_gather(outputs, block)

    def reduce_scatter(self, output: Tensor, rows: Sequence[Tensor]) -> None:
        """As a `Way`."""
        self._way("reduce_scatter", output.nbytes).reduce_scatter(output, rows)

    def _way(self, kind: Kind, block_bytes: int) -> Way:
        size = race_bytes(block_bytes * self._wire.size)
        if (kind, size) not in self.chosen:
            self.chosen[kind, size] = self._winner(kind, size)
        return self._ways[self.chosen[kind, size]]

    def _winner(self, kind: Kind, size: int) -> str:
        """The way whose slowest rank is fastest; all ranks find the same."""
        if len(self._ways) == 1:
            return next(iter(self._ways))
        numel = max(1, size // 4 // self._wire.size)
        many, one = torch.zeros(self._wire.size, numel).unbind(), torch.zeros(numel)
        rows = [_seconds(partial(getattr(way, kind), *_arguments(kind, many, one))) for way in self._ways.values()]
        seconds = torch.tensor(rows, dtype=torch.float64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._wire.wait(self._wire.gloo.allreduce([seconds], options))
        return list(self._ways)[int(seconds.argmin())]


def race_bytes(size: int) -> int:
    """The size that the race for `size` is held with, both in bytes of all ranks' blocks.

    >>> [race_bytes(size) for size in (1, 2**16, 2**16 + 1, 2**30)]
    [65536, 65536, 262144, 16777216]
    """
    race = SMALLEST_RACE
    while race < min(size, LARGEST_RACE):
        race *= CLASS
    return race


def _arguments(kind: Kind, many: Sequence[Tensor], one: Tensor) -> tuple[Sequence[Tensor] | Tensor, ...]:
    return (many, one) if kind == "all_gather" else (one, many)


def _seconds(run: partial[None]) -> float:
    """Of the fastest of some repeats, after one that opens what is opened once."""
    run()
    ends = [time.perf_counter()]
    for _ in range(REPEATS):
        run()
        ends.append(time.perf_counter())
    return min(end - begin for begin, end in pairwise(ends))
