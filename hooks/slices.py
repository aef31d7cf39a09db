"""The slices that gradwire.overlap cuts gradients into, computed without a model in training."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ..compress import Layout, compressor
from ..compress.simulate import steady_traffic
from ..compress.state.shares import ranks_given
from ..ddp_core.buckets.assignment import MEBIBYTE
from ..ddp_core.buckets.slices import MUCH
from ..ddp_core.memory.sliced_memory import may_be_cut
from ..ddp_core.overlap.slice_size import SAMPLE, slice_of_gradient


def gradient_mb(
    spec: str, world_size: int, parameters: Iterable[Tensor], ranks_per_host: int = 1, slice_mb: float | None = None
) -> float:
    """MiB of gradient in a slice of a model of these parameters: see `slice_of_gradient`.

    >>> large = [torch.empty(2**25, device="meta")]
    >>> gradient_mb("none", 4, large), gradient_mb("bf16", 4, large), gradient_mb("powersgd:rank=1", 4, large)
    (2.0, 4.0, 16.0)
    """
    whole_mb = sum(parameter.nbytes for parameter in parameters) / MEBIBYTE
    return slice_of_gradient(_shrinks(spec, world_size, ranks_per_host), whole_mb, slice_mb)


def wire_mb(spec: str, world_size: int, parameters: Iterable[Tensor], slice_mb: float | None = None) -> float:
    """MiB on the wire of such a slice: the `slice_mb` that asks for its size.

    >>> large = [torch.empty(2**25, device="meta")]
    >>> wire_mb("bf16", 4, large), wire_mb("powersgd:rank=1", 4, large) < 0.1
    (2.0, True)
    """
    return gradient_mb(spec, world_size, parameters, slice_mb=slice_mb) / max(1.0, _shrinks(spec, world_size, 1))


@functools.lru_cache(maxsize=256)
def _shrinks(spec: str, world_size: int, ranks_per_host: int) -> float:
    """Return the bytes of an uncompressed all-reduce of a large matrix, divided by the bytes that the compressor sends."""
    built = compressor(spec)
    on_hosts = 1 if ranks_given(built) is None else ranks_per_host
    sides, meta = (SAMPLE, SAMPLE), torch.device("meta")
    layout = Layout(("sample",), (sides,), torch.float32, meta, world_size, ranks_per_host=on_hosts)
    sent = steady_traffic(built, [layout]).sent_bytes
    return 2 * (world_size - 1) / world_size * 4 * layout.numel / sent if sent else 1.0


def parts_of(spec: str, layout: Layout, cut_mb: float) -> int:
    """Into how many slices a bucket is cut: larger ones than `cut_mb` MiB are, where a compressor can take parts."""
    size, cut = layout.numel * layout.dtype.itemsize, cut_mb * MEBIBYTE
    return math.ceil(size / cut) if size > MUCH * cut and _cut(spec) else 1


@functools.lru_cache(maxsize=256)
def _cut(spec: str) -> bool:
    return may_be_cut(compressor(spec))
