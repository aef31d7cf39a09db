"""Sentences for the log of compressors that send more bytes than they need to. No program runs for them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..algorithms.adapters import TwoShot
from ..algorithms.dense import Dense
from ..algorithms.half import Cast
from ..algorithms.quantized import Quantized
from ..feedback.error_feedback import ErrorFeedback, Float32Arithmetic
from ..protocol.compressor import Compressor
from ..protocol.layout import Ranks
from .build import specification


def sent_in_vain(compressor: Compressor, dtype: torch.dtype, ranks: Ranks) -> Iterator[str]:
    """Yield a sentence for each way in which a compressor sends more than it needs to.

    Args:
        compressor: the compressor of all buckets.
        dtype: the dtype of the gradients.
        ranks: the ranks on their hosts.
    """
    core = compressor
    while isinstance(core, ErrorFeedback | Float32Arithmetic):
        core = core.inner
    casts = isinstance(core, Cast) and isinstance(core.inner, Dense) and core.sum == "16bit"
    if casts and dtype.itemsize == torch.bfloat16.itemsize:
        yield (
            f"gradients are {str(dtype).removeprefix('torch.')} already, so {specification(compressor)} sends as many bytes "
            "as none: try int8, which sends half of them"
        )
    if isinstance(core, TwoShot) and isinstance(core.codec, Quantized) and 1 < ranks.per_host < ranks.world_size:
        yield (
            f"each of a host's {ranks.per_host} ranks sends to all ranks of other hosts: hosts+{specification(compressor)} "
            f"sums inside a host first, and sends {fewer_bytes(ranks):.1f}x fewer bytes through its network card"
        )


def fewer_bytes(ranks: Ranks) -> float:
    """Return how many times fewer bytes leave a host by two levels, whatever codec encodes the parts of a bucket.

    There are as many parts as ranks. On one level, each rank of a host sends a part to each rank elsewhere, and a ring
    gathers the averages of all parts. On two levels, each rank of a host sends a part to each other host and gathers as
    many.

    >>> fewer_bytes(Ranks(world_size=16, per_host=8))
    4.9375
    """
    elsewhere = ranks.world_size - ranks.per_host
    return (ranks.per_host * elsewhere + ranks.world_size - 1) / (2 * elsewhere)
