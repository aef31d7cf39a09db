"""A bucket of DDP's as its averager knows it: which buckets of ours are in it, and what carries them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ...compress import AllReduce, Compressor, Layout, Program, specification
from ...compress.protocol import Request
from ..buckets.layout import layout_of
from ..buckets.slices import BucketSlice
from ..engine.driver import FuturePending
from ..engine.engine import Engine
from ..memory.bucket_memory import BucketMemory
from ..memory.model_memory import ModelMemory
from ..transport.protocol import Pending


@dataclass(frozen=True)
class Part:
    """A bucket of ours inside one of DDP's: all of it (`places` is None) or the listed pieces of its flat buffer."""

    memory: BucketMemory
    places: tuple[tuple[int, int], ...] | None
    label: str

    def reduce(self, flat: Tensor, step: int, buffer: Tensor, watched: bool) -> Program[Tensor]:
        """Average this part of `flat`, which is `buffer` as real numbers, in place; returns `buffer`.

        All of it is in the program, so that on CUDA it runs on the side stream, and the future's events cover it.
        """
        if self.places is None:
            yield from self.memory.reduce(flat, step, watched)
            return buffer
        pieces = [flat[first:end] for first, end in self.places]
        average = yield from self.memory.reduce(torch.cat(pieces), step, watched)
        torch._foreach_copy_(pieces, list(average.split([piece.numel() for piece in pieces])))
        return buffer


@dataclass(frozen=True)
class Bound:
    """How a bucket of DDP's is averaged, step after step: all that is known once the bucket is.

    `known`: it holds as long as the averager has this one. `names`: of its parameters, which are `elements` real numbers.
    """

    known: object
    parameters: Sequence[Tensor]
    engine: Engine
    label: str
    names: tuple[str, ...]
    elements: int
    parts: Sequence[Part] = ()


@dataclass(frozen=True)
class OwnBound:
    """The same of a bucket of our own DDP, which outlives it. `total`: the request for the sum of `buffer`."""

    bound: Bound
    buffer: Tensor
    total: AllReduce


def one_round(request: Request) -> Program[Tensor]:
    """A program of one request, whose reply it returns."""
    return (yield request)


@dataclass(frozen=True)
class AllPending:
    """All parts of a bucket, each of whose programs returns the bucket's buffer."""

    parts: Sequence[Pending]

    def wait(self, timeout: timedelta) -> Tensor:
        """The buffer, when all have been averaged in it; raises what one of them raised."""
        return [part.wait(timeout) for part in self.parts][-1]


def all_done(pendings: Sequence[Pending], buffer: Tensor) -> FuturePending:
    """A future that holds `buffer` once all parts have been averaged in it, or raises what one of them raised."""

    def finished(done: torch.futures.Future[Any]) -> Tensor:
        for future in done.value():
            future.value()
        return buffer

    futures = [pending.future for pending in pendings if isinstance(pending, FuturePending)]
    return FuturePending(torch.futures.collect_all(futures).then(finished))


def places_in(layout: Layout, names: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """First and last element of the named parameters in the flat buffer."""
    spans = {n: (o, o + s) for n, o, s in zip(layout.names, layout.offsets, layout.sizes, strict=True)}
    return tuple(spans[name] for name in names)


def parts_of(memory: ModelMemory, named: Mapping[str, Tensor], layout: Layout, bucket: Any) -> list[Part]:
    """The buckets of ours inside one of `layout`: those of a loaded state, or all of it. `named`: its parameters.

    Of a slice of a bucket nothing is remembered.
    """
    if isinstance(bucket, BucketSlice):
        return [slice_of(memory, bucket, layout)]
    parts, index = [], bucket.index()
    for names in memory.split(layout.names):
        mine = {name: named[name] for name in names}
        own = layout_of(mine, layout.dtype, layout.device, layout.world_size, layout.rank)
        places = None if own == layout else places_in(layout, names)
        parts.append(Part(memory.get(own) or memory.add(own), places, labelled(index, names)))
    return parts


def slice_of(memory: ModelMemory, bucket: BucketSlice, layout: Layout) -> Part:
    """A slice of a bucket of `layout`, of which nothing is remembered."""
    own = bucket.layout(layout)
    return Part(BucketMemory(memory.compressor, own, memory.step), None, labelled(bucket.index(), own.names))


def setup(compressor: Compressor, step: int, layout: Layout, values: str | None) -> str:
    """What ranks must agree on at a first bucket; `values`: of its parameters, in a few letters."""
    bucket = f"{len(layout.names)} parameters, {layout.numel} x {layout.dtype}"
    told = "" if values is None else f", their values {values}"
    return f"{specification(compressor)} at step {step} with a first bucket of {bucket}{told}"


def labelled(index: int, names: Sequence[str]) -> str:
    """What messages call a bucket."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"bucket {index} (parameters {shown})"


def names_by_index(bounds: dict[int, Bound]) -> Iterator[tuple[str, ...]]:
    """The names in our buckets, by the index of DDP's bucket that they are in."""
    for index in sorted(bounds):
        yield from (part.memory.layout.names for part in bounds[index].parts)
