"""The amount of gradient that is sent at once, chosen by the amount that travels on the link."""

from __future__ import annotations

import dataclasses

import torch

from ...compress import Compressor, Layout, Ranks
from ...compress.simulate import steady_traffic
from ...compress.state.shares import placed_on_hosts
from ..averaging.averager import CompressedAverager
from ..buckets.assignment import DEFAULT_CAP_MB, MEBIBYTE

PARTS = 8  # of a model, at least
LEAST_GRADIENT_MB, MOST_ON_WIRE_MB = 2.0, 2.0  # of a slice
SIDES = (1024, 1024)  # of the matrix that `shrinks` tries


def slice_of_gradient(smaller: float, whole_mb: float, slice_mb: float | None) -> float:
    """MiB of gradient in a slice, of `whole_mb` in all, where a compressor sends `smaller` times as little.

    `slice_mb`: on the wire. None is an eighth of all, since the first layers wait for the rest of their slice, but 2 MiB at
    least, since each costs calls and latency; and 2 MiB on the wire at most. However little of it travels, a slice has no
    more gradient than a bucket of DDP's.

    >>> slice_of_gradient(1.0, 100.0, None), slice_of_gradient(4.0, 100.0, None), slice_of_gradient(16.0, 100.0, None)
    (2.0, 8.0, 12.5)
    """
    on_wire = slice_mb or MOST_ON_WIRE_MB
    most = on_wire * max(1.0, min(smaller, DEFAULT_CAP_MB / on_wire))
    return most if slice_mb else min(most, max(LEAST_GRADIENT_MB, whole_mb / PARTS))


def slice_bytes(averager: CompressedAverager, whole: int, slice_mb: float | None) -> int:
    """Bytes of gradient in a slice, of `whole` in all, as far as a large matrix tells: see `slice_of_gradient`."""
    compressor = averager.memory.compressor
    smaller = shrinks(compressor, placed_on_hosts(compressor, averager.engines.ranks))
    return max(1, int(slice_of_gradient(smaller, whole / MEBIBYTE, slice_mb) * MEBIBYTE))


def shrinks(compressor: Compressor, ranks: Ranks) -> float:
    """Return the bytes of an uncompressed all-reduce of a large matrix, divided by the bytes that the compressor sends.

    The rank of a host that sends most counts, since one may send all of the matrix: the ratio is the same on all ranks.
    """
    places = (dataclasses.replace(ranks, rank=rank) for rank in range(ranks.per_host))
    layouts = [Layout(("weight",), (SIDES,), torch.float32, torch.device("meta"), place) for place in places]
    sent = max(steady_traffic(compressor, [layout]).sent_bytes for layout in layouts)
    return 2 * (ranks.world_size - 1) / ranks.world_size * 4 * layouts[0].numel / sent if sent else 1.0
