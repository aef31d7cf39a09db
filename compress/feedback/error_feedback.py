"""Error feedback: what compression loses is added to the next gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels import Residual
from ..protocol.compressor import Compressor
from ..protocol.layout import Layout
from ..protocol.requests import Program
from ..state.gauge import Gauge
from ..state.narrow import WIDTHS
from ..state.tensors import PerParameter


@dataclass
class ErrorFeedbackState:
    """The residual of this rank, the inner compressor's state, and samples of both."""

    residual: PerParameter
    inner: Any
    gauge: Gauge


@dataclass(frozen=True)
class ErrorFeedback:
    """Error feedback adds what compression loses to the next gradient (Seide et al. 2014; Karimireddy et al. 2019).

    `residual_bits`: of each element of the residual between steps, see `Narrow`; 32 stands for float32 or wider.
    """

    inner: Compressor
    residual_bits: int = WIDTHS[0]

    def init(self, layout: Layout) -> ErrorFeedbackState:
        """A zero residual, float32 or wider in arithmetic."""
        residual = PerParameter.zeros(layout.widened(), self.residual_bits, residual=True)
        return ErrorFeedbackState(residual, self.inner.init(layout), Gauge())

    def reduce(self, grad: Tensor, state: ErrorFeedbackState, residual: Residual | None = None) -> Program[Tensor]:
        """The inner average of `grad` plus what was held back; an outer residual moves into this one."""
        held = state.residual.open()
        if residual is not None:
            torch.add(held.before, residual.before, out=held.after)
            residual.after.zero_()
            held = Residual(held.after, held.after)
        state.gauge.begin(grad, held)
        average = yield from self.inner.reduce(grad, state.inner, held)
        state.gauge.end(held)
        state.residual.close(held)
        return average
