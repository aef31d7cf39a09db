"""A bucket of DDP's as its averager knows it: which buckets of ours are in it, and what carries them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compress import AllReduce, Compressor, Dense, Layout, Program, specification
from ...compress.protocol.layout import Scope
from ...compress.protocol.requests import Op
from ...compress.simulate import scopes_by_round
from ..buckets.grad_bucket import layout_of
from ..buckets.slices import BucketSlice, Sendable
from ..engine.engine import Engine
from ..engine.lanes import FuturePending
from ..memory.bucket_memory import BucketMemory
from ..memory.model_memory import ModelMemory
from ..transport.protocol import Pending


@dataclass(frozen=True)
class BucketSegment:
    """A bucket of ours inside one of DDP's: all of it (`places` is None) or the listed pieces of its flat buffer.

    `room`: where it is averaged, if not in place.
    """

    memory: BucketMemory
    places: tuple[tuple[int, int], ...] | None
    label: str
    room: Tensor | None = None

    @cached_property
    def is_whole(self) -> bool:
        """True if it is all of a bucket, and averaged in place."""
        return self.places is None and self.room is None

    def reduce(self, flat: Tensor, step: int, buffer: Tensor, watched: bool) -> Program[Tensor]:
        """Average this segment of `flat`, which is `buffer` as real numbers, in place; returns `buffer`.

        All of it is in the program, so that on CUDA it runs on the side stream, and the future's events cover it.
        """
        if self.is_whole:
            yield from self.memory.reduce(flat, step, watched)
            return buffer
        pieces = [flat] if self.places is None else [flat[first:end] for first, end in self.places]
        taken = torch.cat(pieces) if self.room is None else torch.cat(pieces, out=self.room)
        average = yield from self.memory.reduce(taken, step, watched)
        torch._foreach_copy_(pieces, list(average.split([piece.numel() for piece in pieces])))
        return buffer


@dataclass(frozen=True)
class BucketPlan:
    """The way in which a bucket of DDP's is averaged in every step: all that is known once the bucket is.

    `known`: the plan holds as long as the averager has this object, and for gradients that come multiplied by `scale`; None
    for what a hook is given, as it is. `names`: of the parameters. `segments`: what compressors remember, in order.
    `needs_future`: torch waits for the average. `op`: the one all-reduce that the program is, where nothing is remembered:
    "sum" of gradients that come divided by the ranks, or "mean"; else None. `request`: that, of the `buffer` of a bucket of
    our own DDP, which outlives the plan. `on_wait`: the waiting thread runs it, which leaves a thread of its own nothing to
    compute.
    """

    known: object
    parameters: Sequence[Tensor]
    engine: Engine
    label: str
    names: tuple[str, ...]
    scale: float | None
    needs_future: bool
    segments: Sequence[BucketSegment] = ()
    op: Op | None = None
    buffer: Tensor | None = None
    request: AllReduce | None = None
    on_wait: bool = False


def scopes_of_rounds(compressor: Compressor, layout: Layout, *, partial: bool) -> list[set[Scope]]:
    """Return the scopes of a bucket's rounds. `partial`: one more round may ask which parameters were used."""
    scopes = scopes_by_round(compressor, layout)
    if not partial:
        return scopes
    return [{"all", *early, *late} for early, late in zip([*scopes, ()], [(), *scopes], strict=True)]


@dataclass(frozen=True)
class AllPending:
    """The averages of a bucket's segments on their way. Each program returns the buffer of the bucket."""

    segments: Sequence[Pending]

    def wait(self, timeout: timedelta) -> Tensor:
        """The buffer, when all have been averaged in it; raises what one of them raised."""
        return [segment.wait(timeout) for segment in self.segments][-1]


def all_done(pendings: Sequence[Pending], buffer: Tensor) -> FuturePending:
    """A future that holds `buffer` once all segments have been averaged in it, or raises what one of them raised."""

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


def segments_of(
    memory: ModelMemory, bucket: dist.GradBucket | Sendable, named: Mapping[str, Tensor], layout: Layout
) -> list[BucketSegment]:
    """The buckets of ours inside one of `layout`: those of a loaded state, or all of it. `named`: its parameters."""
    if isinstance(bucket, BucketSlice):
        return [slice_of(memory, bucket, layout)]
    segments = []
    for names in memory.split(layout.names):
        mine = {name: named[name] for name in names}
        own = layout_of(mine, layout.dtype, layout.device, layout.ranks)
        places = None if own == layout else places_in(layout, names)
        (found,) = (memory.get(own) or memory.add(own)).slices
        segments.append(BucketSegment(found, places, labelled(bucket.index(), names)))
    return segments


def slice_of(memory: ModelMemory, bucket: BucketSlice, layout: Layout) -> BucketSegment:
    """A slice of a bucket of `layout`: dense, and without a memory, until slices follow a swap to what cannot be cut."""
    own = bucket.layout(layout)
    label = labelled(bucket.index(), own.names)
    if not memory.may_be_cut:
        return BucketSegment(BucketMemory(Dense(), own, memory.step), None, label)
    memory.split(layout.names)  # buckets of a loaded state, which are not asked for again
    cuts = [each.layout(layout) for each in bucket.bucket.slices]
    whole = memory.get(layout, cuts) or memory.add(layout, cuts)
    return BucketSegment(whole.slices[cuts.index(own)], None, label)


def prepared(segment: BucketSegment, memory: ModelMemory, engine: Engine, flat: Tensor) -> BucketSegment:
    """The segment, with the channels that its rounds need, and memory where these are quicker. `flat`: its bucket's."""
    scopes = scopes_of_rounds(memory.compressor, segment.memory.layout, partial=memory.partial)
    engine.prepare(len(scopes), scopes)
    if not engine.transport.allocates:
        return segment
    alone = flat if segment.places is None else flat.new_empty(segment.memory.layout.numel)
    return dataclasses.replace(segment, room=engine.transport.allocate_for(alone))


def setup(compressor: Compressor, step: int, layout: Layout, values: str | None) -> str:
    """Return what ranks must agree on at a first bucket. `values`: a checksum of its parameters."""
    bucket = f"{len(layout.names)} parameters, {layout.numel} x {layout.dtype}"
    told = "" if values is None else f", their values {values}"
    return f"{specification(compressor)} at step {step} with a first bucket of {bucket}{told}"


def labelled(index: int, names: Sequence[str]) -> str:
    """Return the name of a bucket in messages."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"bucket {index} (parameters {shown})"


def names_by_index(plans: dict[int, BucketPlan]) -> Iterator[tuple[str, ...]]:
    """The names in our buckets, by the index of DDP's bucket that they are in."""
    for index in sorted(plans):
        yield from (segment.memory.layout.names for segment in plans[index].segments)
        yield plans[index].names  # of a bucket whose segments are slices
