"""Error feedback whose residual decays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...kernels import Residual
from ..protocol.compressor import Compressor
from ..protocol.layout import Layout
from ..protocol.requests import Program
from ..state.tree import Leaves


@dataclass
class DecayedFeedbackState:
    """The inner compressor's state, and what in it is held back."""

    inner: Any
    held: Leaves


@dataclass(frozen=True)
class DecayedFeedback:
    """Error feedback that keeps a part of each residual, on workers and servers, after each step; the rest is lost.

    So a residual cannot grow without end: with `feedback` f it is at most the sum of 1, f, f², ... of what steps lose. Too
    little for the exact mean in the long run, which matters less to Adam than bursts do.
    """

    inner: Compressor
    feedback: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.feedback < 1:
            raise ValueError(f"a residual is damped by a factor between 0 and 1, got {self.feedback}")

    def init(self, layout: Layout) -> DecayedFeedbackState:
        """The inner state."""
        inner = self.inner.init(layout)
        return DecayedFeedbackState(inner, Leaves(inner))

    def reduce(self, grad: Tensor, state: DecayedFeedbackState, residual: Residual | None = None) -> Program[Tensor]:
        """The inner average."""
        average = yield from self.inner.reduce(grad, state.inner, residual)
        state.held.damp(self.feedback)
        return average
