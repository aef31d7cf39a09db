"""Payloads: the length of rows of bytes, and averages for 16 bits that are computed in 32 and rounded once."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ... import kernels
from ..protocol.layout import working_dtype

ALIGNMENT = 16  # bytes: what NCCL's fast protocols ask for
LONG_ALIGNMENT = 128  # of rows that it makes at most a thirty-second longer: a transaction of a GPU's memory
LONG = 32 * LONG_ALIGNMENT


def padded(size: int) -> int:
    """Bytes of a row of `size`, so that the next one begins where NCCL and GPUs are fast."""
    unit = LONG_ALIGNMENT if size >= LONG else ALIGNMENT
    return -(-size // unit) * unit


def rounded_once(out: Tensor, residual: Tensor | None, write: Callable[[Tensor], None]) -> None:
    """Have `write` write to `out`, or to 32 bits where it has 16; what `out` rounds away is added to `residual`."""
    if out.dtype == working_dtype(out.dtype):
        return write(out)
    wide = kernels.temporary(out.shape, dtype=working_dtype(out.dtype), device=out.device)
    write(wide)
    kernels.cast_scaled(wide, out, 1.0, residual)
