"""A bucket of DDP's as its averager knows it: which buckets of ours are in it, and what carries them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ...compress import Compressor, Dense, Layout, Program, specification
from ...compress.protocol.layout import Scope
from ...compress.protocol.requests import Op
from ...compress.simulate import scopes_by_round
from ...compress.state.gauge import Gauge
from ..buckets.grad_bucket import as_real, axis_order, layout_of
from ..buckets.lying import Turnable
from ..buckets.slices import BucketSlice, Sendable
from ..engine.engine import Engine
from ..engine.lanes import FuturePending
from ..memory.bucket_memory import BucketMemory
from ..memory.model_memory import ModelMemory, Orders
from ..transport.protocol import Pending
from .shown_averages import Parts

Reduce: TypeAlias = Callable[[Tensor, int, bool], Program[Tensor]]
Places: TypeAlias = tuple[tuple[int, int], ...]  # first and last element of each piece of a flat buffer
Segment: TypeAlias = tuple[BucketMemory, Places | None]  # a bucket of ours, and its places in DDP's; None: all of it


@dataclass(frozen=True)
class BucketProgram:
    """The program of every step that averages a bucket of DDP's, or one of ours inside it.

    `reduce`: makes the program of a step, from the buffer of DDP's bucket, the number of steps before, and True where the
    average has a say in whether the step counts. The program averages in place and returns the buffer. `names`: of the
    parameters. `nbytes`: of the gradients, where they count as on their way.
    """

    reduce: Reduce
    label: str
    names: tuple[str, ...]
    elements: int
    element_bytes: int
    nbytes: int
    gauge: Gauge | None = None


@dataclass(frozen=True)
class BucketPlan:
    """The way in which a bucket of DDP's is averaged in every step: all that is known once the bucket is.

    `known`: the plan holds as long as the averager has this object, and for gradients that come multiplied by `scale`; None
    for what a hook is given, as it is. `buckets`: names in each of ours inside it, then in all of it. `op`: the one
    all-reduce that is its program, where nothing is remembered: "sum" of gradients that come divided by the ranks, or
    "mean"; else None. `orders`: of each parameter's axes in the buffer. `buffer`: that such a program of our own DDP was
    made for. `on_wait`: the waiting thread runs it, which leaves a thread of its own nothing to compute. `parts`: of its
    average, by parameter. `turnable`: where torch reads averages as parameters lie now, those that may be turned.
    """

    known: object
    parameters: Sequence[Tensor]
    engine: Engine
    scale: float | None
    buckets: Sequence[tuple[str, ...]]
    programs: Sequence[BucketProgram]
    parts: Parts
    orders: Sequence[Sequence[int]] = ()
    turnable: Mapping[str, Turnable] = field(default_factory=dict)
    op: Op | None = None
    buffer: Tensor | None = None
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
    if buffer.is_cuda:  # on the side stream each has come to its end before the next
        return FuturePending(futures[-1])
    return FuturePending(torch.futures.collect_all(futures).then(finished))


def places_in(layout: Layout, names: Sequence[str]) -> Places:
    """First and last element of the named parameters in the flat buffer."""
    spans = {n: (o, o + s) for n, o, s in zip(layout.names, layout.offsets, layout.sizes, strict=True)}
    return tuple(spans[name] for name in names)


def segments_of(
    memory: ModelMemory, bucket: dist.GradBucket | Sendable, lying: Mapping[str, Tensor], layout: Layout
) -> list[Segment]:
    """The buckets of ours inside one of `layout`: those of a loaded state, or all of it. `lying`: see `lying_in`."""
    orders = {name: axis_order(each) for name, each in lying.items()}
    if isinstance(bucket, BucketSlice):
        return [(slice_of(memory, bucket, layout, orders), None)]
    segments: list[Segment] = []
    for names in memory.split(layout.names):
        own = layout_of({name: lying[name] for name in names}, layout.dtype, layout.device, layout.ranks)
        mine = {name: orders[name] for name in names}
        (found,) = (memory.get(own, orders=mine) or memory.add(own, orders=mine)).slices
        segments.append((found, None if own == layout else places_in(layout, names)))
    return segments


def slice_of(memory: ModelMemory, bucket: BucketSlice, layout: Layout, orders: Orders) -> BucketMemory:
    """A slice of a bucket of `layout`: dense, and without a memory, until slices follow a swap to what cannot be cut."""
    own = bucket.layout(layout)
    if not memory.may_be_cut:
        return BucketMemory(Dense(), own, memory.step)
    memory.split(layout.names)  # buckets of a loaded state, which are not asked for again
    cuts = [each.layout(layout) for each in bucket.bucket.slices]
    whole = memory.get(layout, cuts, orders) or memory.add(layout, cuts, orders)
    return whole.slices[cuts.index(own)]


def program_of(segment: Segment, memory: ModelMemory, engine: Engine, index: int, buffer: Tensor) -> BucketProgram:
    """The program of a segment, with the channels that its rounds need, and memory where these are quicker."""
    (own, places), flat = segment, as_real(buffer)
    layout, transport, size = own.layout, engine.transport, flat.element_size()
    scopes = scopes_of_rounds(memory.compressor, layout, partial=memory.partial)
    engine.prepare(len(scopes), scopes)
    room = None
    if transport.allocates:
        room = transport.allocate_for(flat if places is None else flat.new_empty(layout.numel))
    in_place = places is None and room is None and flat is buffer
    reduce: Reduce = own.reduce if in_place else partial(reduce_apart, own, places, room)
    label = labelled(index, layout.names)
    return BucketProgram(reduce, label, layout.names, layout.numel, size, size * layout.numel, own.gauge)


def reduce_apart(
    own: BucketMemory, places: Places | None, room: Tensor | None, buffer: Tensor, step: int, watched: bool
) -> Program[Tensor]:
    """Average pieces of a buffer, or with `places` None all of it, in `room` if there is any; returns the buffer.

    All copies are in the program, so that on CUDA they run on the side stream, and the future's events cover them.
    """
    flat = as_real(buffer)
    pieces = [flat] if places is None else [flat[first:end] for first, end in places]
    taken = flat if places is None and room is None else torch.cat(pieces, out=room)
    average = yield from own.reduce(taken, step, watched)
    if average is not flat:
        torch._foreach_copy_(pieces, list(average.split([piece.numel() for piece in pieces])))
    return buffer


def setup(compressor: Compressor, step: int, layout: Layout, values: str | None, *, partial: bool) -> str:
    """Return what ranks must agree on at a first bucket. `values`: of its parameters: see `StartingValues`."""
    bucket = f"{len(layout.names)} parameters, {layout.numel} x {layout.dtype}"
    told = "" if values is None else f", {values}"
    unused = " and find_unused_parameters=True" if partial else ""
    return f"{specification(compressor)} at step {step}{unused} with a first bucket of {bucket}{told}"


def labelled(index: int, names: Sequence[str]) -> str:
    """Return the name of a bucket in messages."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"bucket {index} (parameters {shown})"
