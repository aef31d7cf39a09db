"""No compression: the baseline, the warm-up, and what small parameters get."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels import Residual
from ..protocol.compressor import Traits
from ..protocol.layout import Layout
from ..protocol.registry import register
from ..protocol.requests import Program, all_reduce


@register("none", lossy=False, traits=Traits(averages=True, ignores_shapes=True, residual_first=True))
@dataclass(frozen=True)
class Dense:
    """No compression: one all-reduce of the mean in the gradient's own dtype, as DDP does by itself."""

    def init(self, layout: Layout) -> None:
        """Nothing to remember."""

    def reduce(self, grad: Tensor, state: None, residual: Residual | None = None) -> Program[Tensor]:
        """The exact mean; flushes the residual."""
        if residual is not None:
            grad.add_(residual.before)
            residual.after.zero_()
        return all_reduce(grad, exact=True)
