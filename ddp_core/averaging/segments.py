"""The buckets of a memory inside one of DDP's: all of it, a slice, or those that a loaded state was saved with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from ...compress import Compressor, Dense, Layout, Program
from ...compress.protocol.layout import Scope
from ...compress.simulate import scopes_by_round
from ..buckets.grad_bucket import as_real, axis_order, layout_of
from ..buckets.protocol import Bucket
from ..buckets.slices import BucketSlice
from ..engine.engine import Engine
from ..memory.bucket_memory import BucketMemory
from ..memory.claims import Orders
from ..memory.model_memory import ModelMemory
from .plans import Reduce, Sent, labelled

Places: TypeAlias = tuple[tuple[int, int], ...]  # first and last element of each piece of a flat buffer
Segment: TypeAlias = tuple[BucketMemory, Places | None]  # a bucket of ours, and its places in DDP's; None: all of it


def scopes_of_rounds(compressor: Compressor, layout: Layout, *, partial: bool) -> list[set[Scope]]:
    """Return the scopes of a bucket's rounds. `partial`: one more round may ask which parameters were used."""
    scopes = scopes_by_round(compressor, layout)
    if not partial:
        return scopes
    return [{"all", *early, *late} for early, late in zip([*scopes, ()], [(), *scopes], strict=True)]


def places_in(layout: Layout, names: Sequence[str]) -> Places:
    """First and last element of the named parameters in the flat buffer."""
    spans = {n: (o, o + s) for n, o, s in zip(layout.names, layout.offsets, layout.sizes, strict=True)}
    return tuple(spans[name] for name in names)


def segments_of(memory: ModelMemory, bucket: Bucket, templates: Mapping[str, Tensor], layout: Layout) -> list[Segment]:
    """The buckets of ours inside one of `layout`: those of a loaded state, or all of it. `templates`: see `templates_in`."""
    orders = {name: axis_order(each) for name, each in templates.items()}
    if isinstance(bucket, BucketSlice):
        return [(slice_of(memory, bucket, layout, orders), None)]
    segments: list[Segment] = []
    for names in memory.claims.split(layout.names):
        own = layout_of({name: templates[name] for name in names}, layout.dtype, layout.device, layout.ranks)
        mine = {name: orders[name] for name in names}
        (found,) = (memory.get(own, orders=mine) or memory.add(own, orders=mine)).slices
        segments.append((found, None if own == layout else places_in(layout, names)))
    return segments


def slice_of(memory: ModelMemory, bucket: BucketSlice, layout: Layout, orders: Orders) -> BucketMemory:
    """A slice of a bucket of `layout`: dense, and without a memory, until slices follow a swap to what cannot be cut."""
    own = bucket.layout(layout)
    if not memory.may_be_cut:
        return BucketMemory(Dense(), own, memory.step)
    memory.claims.forget(layout.names)  # and note no cut, as `segments_of` does: slices have cuts of their own
    cuts = [each.layout(layout) for each in bucket.bucket.slices]
    whole = memory.get(layout, cuts, orders) or memory.add(layout, cuts, orders)
    return whole.slices[cuts.index(own)]


def program_of(
    segment: Segment, memory: ModelMemory, engine: Engine, index: int, buffer: Tensor
) -> tuple[Reduce, Sent]:
    """Return the function that makes a segment's program in each step, with memory where that saves rounds, and its name."""
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
    return reduce, Sent(label, layout.names, layout.numel, size, size * layout.numel, own.gauge)


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
