"""Error feedback: what compression loses is added to the next gradient.

Also here: arithmetic in float32 for 16-bit gradients. The rounding of their averages goes into the residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ...kernels import Residual
from ..protocol.compressor import Compressor, Traits, own_traits, with_traits
from ..protocol.layout import Layout, working_dtype
from ..protocol.requests import Program, after_first
from ..state.gauge import Gauge
from ..state.leaf import WIDTHS
from ..state.tensors import PerParameter
from ..state.tree import Leaves
from .switch import Switch


@dataclass
class ErrorFeedbackState:
    """The residual of this rank, the inner compressor's state, samples of both; all residuals, where they decay."""

    residual: PerParameter
    inner: Any
    gauge: Gauge
    decaying: Leaves | None = None

    def close(self, held: Residual) -> None:
        """Take a sample of the residual that a step has written, and keep it."""
        self.gauge.end(held)
        self.residual.close(held)


@dataclass(frozen=True)
class ErrorFeedback:
    """Error feedback adds what compression loses to the next gradient (Seide et al. 2014; Karimireddy et al. 2019).

    `residual_bits`: of each element of the residual between steps, see `Narrow`; 32 stands for float32 or wider. Copies in
    float32 are gone before a bucket leaves, where the inner compressor can do without. `kept`: the part of each residual,
    on workers and servers, that stays after a step; the rest is lost. So a residual cannot grow without end: it is at most
    the sum of 1, `kept`, `kept` squared, ... of what steps lose. Too little for the exact mean in the long run, which
    matters less to Adam than bursts do.
    """

    inner: Compressor
    residual_bits: int = WIDTHS[0]
    kept: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.kept <= 1:
            raise ValueError(f"error feedback keeps a part of a residual above 0 and up to 1, got {self.kept}")

    def init(self, layout: Layout) -> ErrorFeedbackState:
        """A zero residual, float32 or wider in arithmetic."""
        residual = PerParameter.zeros(layout.widened(), self.residual_bits, residual=True)
        inner = self.inner.init(layout)
        return ErrorFeedbackState(residual, inner, Gauge(), Leaves((residual, inner)) if self.kept < 1 else None)

    def reduce(self, grad: Tensor, state: ErrorFeedbackState, residual: Residual | None = None) -> Program[Tensor]:
        """The inner average of `grad` plus what was held back; an outer residual moves into this one."""
        held = state.residual.open()
        if residual is not None:
            torch.add(held.before, residual.before, out=held.after)
            residual.after.zero_()
            held = Residual(held.after, held.after)
        state.gauge.begin(grad, held)
        wide, averaging = grad.dtype.itemsize >= 4, self.inner.reduce(grad, state.inner, held)
        if state.residual.store is not None and wide and own_traits(self.inner).residual_first:  # of wide gradients
            average: Tensor = yield from after_first(averaging, lambda: state.close(held))
        else:
            average = yield from averaging
            state.close(held)
        if state.decaying is not None:
            state.decaying.damp(self.kept)
        return average


@with_traits(lambda each: Traits(residual_first=own_traits(each.inner).residual_first))
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
        released = residual is None and any(leaves.hold_back for leaves in state.leaves[:now])  # into 16 bits
        return not released and _takes_16_bits(compressor.stages[now], state.stages[now], residual)
    return own_traits(compressor).takes_16_bits
