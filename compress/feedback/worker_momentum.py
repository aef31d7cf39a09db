"""Momentum on the workers, before compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels import Residual
from ..protocol.compressor import Compressor, Traits, with_traits
from ..protocol.layout import Layout
from ..protocol.requests import Program
from ..state.tensors import PerParameter


@dataclass
class WorkerMomentumState:
    """The momentum of this rank's gradients, and the inner compressor's state."""

    velocity: PerParameter
    inner: Any


@with_traits(Traits(needs_all_parameters=True))
@dataclass(frozen=True)
class WorkerMomentum:
    """Each rank compresses u = `momentum` u + gradient; the optimizer then runs without momentum of its own.

    Of the wrappers that options make it is the outermost: a residual is added to u, behind the momentum.
    Without compression the average of u is what SGD with that momentum goes along, at the same learning rate: Lin et al.
    2018, equation 4, without masking. u is float32 or wider; what is compressed has the gradient's dtype. A parameter that
    no rank uses in a step would be given momentum twice, so every step must use all.
    """

    inner: Compressor
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.momentum < 1:
            raise ValueError(f"momentum is between 0 and 1, got {self.momentum}")

    def init(self, layout: Layout) -> WorkerMomentumState:
        """A momentum of zero."""
        return WorkerMomentumState(PerParameter.zeros(layout.widened(), of_gradients=True), self.inner.init(layout))

    def reduce(self, grad: Tensor, state: WorkerMomentumState, residual: Residual | None = None) -> Program[Tensor]:
        """The inner average of u, in place of `grad`."""
        before, after = state.velocity.update()
        torch.add(grad, before, alpha=self.momentum, out=after)
        grad.copy_(after)
        return (yield from self.inner.reduce(grad, state.inner, residual))
