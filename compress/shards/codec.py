"""The codecs of shards: of compressors whose first round is an all-to-all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..algorithms.adapters import TwoShot
from ..algorithms.core import Core
from ..algorithms.dense import Dense
from ..algorithms.half import Cast, SixteenBits
from ..builder.build import Spec, UnknownCompressor, compressor, compressors
from ..feedback.error_feedback import ErrorFeedback, Float32Arithmetic
from ..protocol.compressor import Codec, inside
from ..state.leaf import WIDTHS


def needed(codec: Codec | None, dtype: torch.dtype) -> Codec | None:
    """Return the codec for numbers of a dtype; None if they travel as they are, which those of 16 bits do in 16 bits."""
    return None if isinstance(codec, SixteenBits) and codec.dtype == dtype else codec


def taken() -> list[str]:
    """Return the names of the compressors that shards take."""
    return [name for name in compressors() if name == "hosts" or _parts(compressor(name)) is not None]


@contextmanager
def names_of_shards() -> Iterator[None]:
    """Have the error for an unknown compressor list those that shards take."""
    try:
        yield
    except UnknownCompressor as error:
        raise UnknownCompressor(error.name, taken()) from None


def codec_of(built: Any, spec: Spec) -> tuple[Codec | None, float, int]:
    """Return the codec of a compressor, the part of its rounding errors that is held back, and in how many bits.

    Raises ValueError for compressors that need whole gradients.
    """
    if (parts := _parts(built)) is not None:
        return parts
    if any(isinstance(each, Core) for each in inside(built)):
        raise ValueError(f"core= needs whole matrices, which no rank has here: leave it out of {spec!r}")
    raise ValueError(
        f"shards take {', '.join(taken())}, with block, rounding and error_feedback; {spec!r} needs gradients that no rank "
        "has whole. With DDP it works, and between replicas of hybrid sharding"
    )


def _parts(built: Any) -> tuple[Codec | None, float, int] | None:
    """Return what `codec_of` does; None if the compressor needs whole gradients."""
    kept, bits, core = 0.0, WIDTHS[0], built
    if isinstance(built, ErrorFeedback):
        kept, bits, core = built.kept, built.residual_bits, built.inner
    core = core.inner if isinstance(core, Float32Arithmetic) else core
    core = core.owners if isinstance(core, Cast) and core.inner == Dense() else core
    if isinstance(core, TwoShot):
        return core.codec, kept, bits
    return (None, 0.0, WIDTHS[0]) if core == Dense() else None
