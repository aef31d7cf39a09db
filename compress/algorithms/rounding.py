"""Averages for gradients of 16 bits, computed in 32 and rounded once."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ... import kernels
from ..protocol.layout import working_dtype


def rounded_once(out: Tensor, residual: Tensor | None, write: Callable[[Tensor], None]) -> None:
    """Have `write` write to `out`, or to 32 bits where it has 16; what `out` rounds away is added to `residual`."""
    if out.dtype == working_dtype(out.dtype):
        return write(out)
    wide = kernels.temporary(*out.shape, dtype=working_dtype(out.dtype), device=out.device)
    write(wide)
    kernels.cast_scaled(wide, out, 1.0, residual)
