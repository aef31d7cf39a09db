"""The slices that gradwire.overlap cuts gradients into, computed without a model in training."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

from torch import Tensor

from ...compress import Layout, Ranks, compressor
from ...compress.state.shares import placed_on_hosts, ranks_seen
from ...ddp_core.buckets.assignment import MEBIBYTE
from ...ddp_core.buckets.slices import MUCH
from ...ddp_core.memory.sliced_memory import may_be_cut
from ...ddp_core.overlap.slice_order import shrinks, slice_of_gradient


def gradient_mb(spec: str, ranks: Ranks, parameters: Iterable[Tensor], slice_mb: float | None = None) -> float:
    """MiB of gradient in a slice of a model of these parameters: see `slice_of_gradient`.

    >>> import torch
    >>> large = [torch.empty(2**25, device="meta")]
    >>> [gradient_mb(spec, Ranks(4), large) for spec in ("none", "bf16", "powersgd:rank=1")]
    [2.0, 4.0, 16.0]
    """
    whole_mb = sum(parameter.nbytes for parameter in parameters) / MEBIBYTE
    return slice_of_gradient(_shrinks(spec, ranks), whole_mb, slice_mb)


def wire_mb(spec: str, ranks: Ranks, parameters: Iterable[Tensor], slice_mb: float | None = None) -> float:
    """MiB on the wire of such a slice: the `slice_mb` that asks for its size.

    >>> import torch
    >>> large = [torch.empty(2**25, device="meta")]
    >>> wire_mb("bf16", Ranks(4), large), wire_mb("powersgd:rank=1", Ranks(4), large) < 0.1
    (2.0, True)
    """
    return gradient_mb(spec, ranks, parameters, slice_mb) / max(1.0, _shrinks(spec, ranks))


@functools.lru_cache(maxsize=256)
def _shrinks(spec: str, ranks: Ranks) -> float:
    built = compressor(spec)
    return shrinks(built, placed_on_hosts(built, ranks_seen(built, ranks)))


def parts_of(spec: str, layout: Layout, cut_mb: float) -> int:
    """Into how many slices a bucket is cut: larger ones than `cut_mb` MiB are, where a compressor can take parts."""
    size, cut = layout.numel * layout.dtype.itemsize, cut_mb * MEBIBYTE
    return math.ceil(size / cut) if size > MUCH * cut and _cut(spec) else 1


@functools.lru_cache(maxsize=256)
def _cut(spec: str) -> bool:
    return may_be_cut(compressor(spec))
