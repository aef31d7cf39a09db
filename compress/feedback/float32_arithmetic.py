"""Arithmetic in float32 for 16-bit gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ... import kernels
from ...kernels import Residual
from ..protocol.compressor import Compressor
from ..protocol.layout import Layout, working_dtype
from ..protocol.requests import Program
from ..protocol.traits import own_traits
from .switch import Switch


@dataclass(frozen=True)
class Float32Arithmetic:
    """Arithmetic in float32 for 16-bit gradients; what the 16-bit result cannot hold goes to the residual.

    An inner compressor with `takes_16_bits` does so by itself; others are given a copy in float32.
    """

    inner: Compressor

    def init(self, layout: Layout) -> Any:
        """The inner state, for the wide layout."""
        return self.inner.init(layout.widened())

    def reduce(self, grad: Tensor, state: Any, residual: Residual | None = None) -> Program[Tensor]:
        """The inner average, taken in float32 or wider."""
        if grad.dtype.itemsize >= 4 or _takes_16_bits(self.inner, state, residual):
            return self.inner.reduce(grad, state, residual)
        return self._reduce_wide(grad, state, residual)

    def _reduce_wide(self, grad: Tensor, state: Any, residual: Residual | None) -> Program[Tensor]:
        wide = yield from self.inner.reduce(grad.to(working_dtype(grad.dtype)), state, residual)
        kernels.cast_scaled(wide, grad, 1.0, None if residual is None else residual.after)
        return grad


def _takes_16_bits(compressor: Compressor, state: Any, residual: Residual | None) -> bool:
    """Return True if the next step of a compressor reads 16 bits, computes in float32 and rounds the average once."""
    if isinstance(compressor, Switch):
        now = compressor.stage(state)
        released = residual is None and any(leaves.hold_back for leaves in state.leaves[:now])  # into the gradient
        return not released and _takes_16_bits(compressor.stages[now], state.stages[now], residual)
    return own_traits(compressor).takes_16_bits
