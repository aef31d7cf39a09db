"""The codecs of shards: of compressors whose first round is an all-to-all."""

from __future__ import annotations

from typing import Any

import torch

from ..algorithms.adapters import TwoShot
from ..algorithms.dense import Dense
from ..algorithms.half import Cast, SixteenBits
from ..builder.build import Spec
from ..feedback.error_feedback import ErrorFeedback, Float32Arithmetic
from ..protocol.compressor import Codec
from ..state.leaf import WIDTHS


def needed(codec: Codec | None, dtype: torch.dtype) -> Codec | None:
    """Return the codec for numbers of a dtype; None if they travel as they are, which those of 16 bits do in 16 bits."""
    return None if isinstance(codec, SixteenBits) and codec.dtype == dtype else codec


def codec_of(built: Any, spec: Spec) -> tuple[Codec | None, float, int]:
    """Return the codec of a compressor, the part of its rounding errors that is held back, and in how many bits.

    Raises ValueError for compressors that need whole gradients.
    """
    kept, bits, core = 0.0, WIDTHS[0], built
    if isinstance(built, ErrorFeedback):
        kept, bits, core = built.kept, built.residual_bits, built.inner
    core = core.inner if isinstance(core, Float32Arithmetic) else core
    core = core.owners if isinstance(core, Cast) and core.inner == Dense() else core
    if isinstance(core, TwoShot):
        return core.codec, kept, bits
    if core == Dense():
        return None, 0.0, WIDTHS[0]
    raise ValueError(
        "shards take none, bf16, int8, int4, int2 or onebit, with block, rounding and error_feedback; "
        f"{spec!r} needs gradients that no rank has whole. With DDP it works, and between replicas of hybrid sharding"
    )
