"""The amount of gradient that is sent at once, chosen by the amount that travels on the link."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...compress import Layout
from ...compress.simulate import dry_run
from ...compress.state.shares import ranks_given
from ..averaging.averager import CompressedAverager
from ..buckets.assignment import DEFAULT_CAP_MB, MEBIBYTE

PARTS = 8  # of a model, at least
LEAST_GRADIENT_MB, MOST_ON_WIRE_MB = 2.0, 2.0  # of a slice
SAMPLE = 1024  # the sides of a matrix that tells by how much a compressor makes gradients smaller


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


def slice_bytes(averager: CompressedAverager, whole: int, slice_mb: float | None, device: torch.device) -> int:
    """Bytes of gradient in a slice, of `whole` in all, as far as a large matrix tells: see `slice_of_gradient`."""
    group = averager.engines.group
    sides = (SAMPLE, SAMPLE)
    compressor = averager.memory.compressor
    layout = Layout(("sample",), (sides,), torch.float32, device, group.size())
    on_host = range(ranks_given(compressor) or 1)  # of which one may have all of the sample; the same on all ranks
    sent = max(dry_run(compressor, replace(layout, rank=rank)).sent_bytes for rank in on_host)
    reduced = 2 * (group.size() - 1) / group.size() * 4 * layout.numel  # bytes of an all-reduce
    smaller = reduced / sent if sent else 1.0
    return max(1, int(slice_of_gradient(smaller, whole / MEBIBYTE, slice_mb) * MEBIBYTE))
