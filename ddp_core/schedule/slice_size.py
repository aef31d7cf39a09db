"""How much gradient is sent at once, so that it takes about so much of the link."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...compress import Layout
from ...compress.shares import ranks_given
from ...compress.simulate import dry_run
from ..averaging.averager import CompressedAverager
from ..buckets.assignment import DEFAULT_CAP_MB, MEBIBYTE

LARGEST = int(DEFAULT_CAP_MB * MEBIBYTE)  # bytes of gradient, however little of it travels
SAMPLE = 1024  # the sides of a matrix that tells by how much a compressor makes gradients smaller


def slice_bytes(averager: CompressedAverager, slice_mb: float, device: torch.device) -> int:
    """Bytes of gradient whose payload on the wire is about `slice_mb` MiB, as far as a large matrix tells."""
    group = averager.engines.group
    sides = (SAMPLE, SAMPLE)
    compressor = averager.memory.compressor
    layout = Layout(("sample",), (sides,), torch.float32, device, group.size())
    on_host = range(ranks_given(compressor) or 1)  # of which one may have all of the sample; the same on all ranks
    sent = max(dry_run(compressor, replace(layout, rank=rank)).sent_bytes for rank in on_host)
    whole = 2 * (group.size() - 1) / group.size() * 4 * layout.numel  # of an all-reduce
    smaller = whole / sent if sent else 1.0
    return max(1, min(int(slice_mb * MEBIBYTE * max(1.0, smaller)), max(LARGEST, int(slice_mb * MEBIBYTE))))
