"""From a codec, a method of one round, to a compressor.

Rows begin as zeros, so that what pads them is the same on every rank and at every step. What a program needs no more it
drops before the next request: other buckets are on their way beside it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ...kernels import Residual, temporary
from ..protocol.compressor import Codec, Compressor, Traits, own_traits, with_traits
from ..protocol.layout import Layout, working_dtype
from ..protocol.requests import AllGather, AllToAll, Program, together
from ..state.leaf import WIDTHS
from ..state.tensors import Chunk, Counter
from .cuts import Cut, cut_bucket
from .zero_rows import ZeroRows, any_of

Scope: TypeAlias = Literal["bucket", "tensor"]


@dataclass
class Draws:
    """The source of a codec's random numbers: a key for each bucket and rank, and the steps seen."""

    key: int
    step: Counter


def draws(codec: Codec, layout: Layout) -> Draws | None:
    """Return what a codec draws from, if it draws. Ranks draw apart, so that their errors average out."""
    if not own_traits(codec).draws:
        return None
    digest = hashlib.sha256(f"{layout.ranks.rank}/{layout.names}/{layout.starts}".encode()).digest()
    return Draws(int.from_bytes(digest[:8], "big") >> 1, Counter())


def drawn(state: Draws) -> tuple[dict[str, int], dict[str, int]]:
    """Key and counter for a step's first encoding and for its second; the step is counted."""
    first = state.step.value << 33
    state.step.value += 1
    return {"key": state.key, "counter": first}, {"key": state.key, "counter": first + (1 << 32)}


def _traits(adapter: Gathered | TwoShot) -> Traits:
    codec = own_traits(adapter.codec)
    return Traits(codec.takes_16_bits, ignores_shapes=True, packs_bytes=True, residual_first=True)


@dataclass
class GatherState:
    """The cut of the bucket, and what the codec draws from."""

    cut: Cut
    draws: Draws | None


@with_traits(_traits)
@dataclass(frozen=True)
class Gathered:
    """Every rank's encoded bucket goes to every other: one all-gather, bytes that grow with the number of ranks."""

    codec: Codec

    def init(self, layout: Layout) -> GatherState:
        """Nothing to remember, but for what a codec draws from."""
        return GatherState(cut_bucket(self.codec, layout, 1), draws(self.codec, layout))

    def reduce(self, grad: Tensor, state: GatherState, residual: Residual | None = None) -> Program[Tensor]:
        """The mean of what the ranks' payloads say."""
        if not grad.numel():
            return grad
        cut = state.cut
        rows = temporary((1, cut.row_bytes), dtype=torch.uint8, device=grad.device).zero_()
        cut.encode(grad, residual, rows, **drawn(state.draws)[0] if state.draws else {})
        gathered = yield AllGather(rows)
        del rows
        cut.decode(gathered, grad, residual)
        return grad


@dataclass
class TwoShotState:
    """The residual of this rank as the server of its part; the cut of the bucket; the ranks; what the codec draws from.

    `rows`: those that stay zero by a bit of their own; None where the codec keeps zeros.
    """

    server_residual: Chunk | None
    cut: Cut
    world_size: int
    draws: Draws | None
    rows: ZeroRows | None = None


@with_traits(_traits)
@dataclass(frozen=True)
class TwoShot:
    """Each rank averages one part of the bucket for all: an all-to-all of encoded parts, then an all-gather.

    The averaged part is encoded again, with a residual of its own on the serving rank (Tang et al. 2019, DoubleSqueeze),
    so the bytes do not grow with the number of ranks. `error_feedback`: whether it surrounds this; without, servers need no
    residual. `residual_bits`: as of that error feedback.
    """

    codec: Codec
    error_feedback: bool = field(default=True, repr=False)
    residual_bits: int = field(default=WIDTHS[0], repr=False)

    def init(self, layout: Layout) -> TwoShotState:
        """A zero residual for the part that this rank serves, with `error_feedback`."""
        if getattr(self.codec, "core", 0):
            raise ValueError(f"TwoShot sends codes without a core, got {self.codec!r}: build it by gradwire.compressor")
        cut = cut_bucket(self.codec, layout, layout.ranks.world_size, layout.ranks.rank)
        chunk = Chunk.zeros(layout, *cut.served, self.residual_bits) if self.error_feedback else None
        rows = None if own_traits(self.codec).keeps_zeros else ZeroRows.of_layout(layout)
        return TwoShotState(chunk, cut, layout.ranks.world_size, draws(self.codec, layout), rows)

    def reduce(self, grad: Tensor, state: TwoShotState, residual: Residual | None = None) -> Program[Tensor]:
        """The mean, rounded twice. Without a worker residual the server keeps none either."""
        if not grad.numel():
            return grad
        server = None if residual is None else state.server_residual
        rows, cut, size = state.rows, state.cut, state.cut.row_bytes
        bits = 0 if rows is None else rows.row_bytes(state.world_size)
        first, second = drawn(state.draws) if state.draws else ({}, {})
        payload = temporary((state.world_size, size + bits), dtype=torch.uint8, device=grad.device).zero_()
        if rows is not None:
            used = rows.used(grad, residual, state.world_size)
            if server is not None:
                rows.mark(used, server.stored, cut.served)
            rows.packed(used, state.world_size, out=payload[:, size:])
        cut.encode(grad, residual, payload[:, :size], **first)
        received = yield AllToAll(payload)
        del payload
        start, end = cut.served
        served = temporary((end - start,), dtype=working_dtype(grad.dtype), device=grad.device)
        cut.decode_own(received[:, :size].unsqueeze(1), served)
        payload = temporary((1, size + bits), dtype=torch.uint8, device=grad.device).zero_()
        if rows is not None:
            any_of(received[:, size:], out=payload[0, size:])
        held = None if server is None else server.open()
        cut.encode_own(served, held, payload[:, :size], **second)
        del received, served
        if server is not None and held is not None:
            server.close(held)
        averages = (yield AllGather(payload)).view(1, state.world_size, size + bits)
        del payload
        cut.decode(averages[..., :size], grad, residual)
        if rows is not None:
            used = rows.unpacked(averages[..., size:])
            rows.clear(used, grad)
            if residual is not None:
                rows.clear(used, residual.after)
            if held is not None:
                rows.clear(used, held.after, cut.served)
        return grad


@dataclass
class PerTensorState:
    """For each tensor its place, as a slice, and its state."""

    places: tuple[slice, ...]
    states: tuple[Any, ...]


@with_traits(lambda each: Traits(takes_16_bits=own_traits(each.inner).takes_16_bits))
@dataclass(frozen=True)
class PerTensor:
    """The inner compressor on each tensor of a bucket, all of them in the same rounds."""

    inner: Compressor

    def init(self, layout: Layout) -> PerTensorState:
        """A state for each tensor."""
        layouts = [layout.select([index]) for index in range(len(layout.names))]
        places = tuple(slice(first, first + size) for first, size in zip(layout.offsets, layout.sizes, strict=True))
        return PerTensorState(places, tuple(map(self.inner.init, layouts)))

    def reduce(self, grad: Tensor, state: PerTensorState, residual: Residual | None = None) -> Program[Tensor]:
        """Each tensor's average, in its place."""
        programs = []
        for place, inner in zip(state.places, state.states, strict=True):
            held = None if residual is None else Residual(residual.before[place], residual.after[place])
            programs.append(self._one(grad[place], inner, held))
        yield from together(*programs)
        return grad

    def _one(self, part: Tensor, state: Any, residual: Residual | None) -> Program[None]:
        average = yield from self.inner.reduce(part, state, residual)
        if average is not part:
            part.copy_(average)


def gathered(codec: Any) -> Compressor:
    """`Gathered`, for codecs with a `scope`: of a bucket, or of each of its tensors."""
    return PerTensor(Gathered(codec)) if codec.scope == "tensor" else Gathered(codec)


def check_scope(method: str, scope: str) -> None:
    """ValueError for what is neither."""
    if scope not in ("bucket", "tensor"):
        raise ValueError(f"{method}:scope is bucket or tensor, got {scope!r}")
