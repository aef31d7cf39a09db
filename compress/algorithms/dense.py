"""No compression: the baseline, the warm-up, and what small parameters get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...kernels import Residual
from ..protocol.layout import Layout
from ..protocol.registry import register
from ..protocol.requests import Program, all_reduce


@register("none", lossy=False)
@dataclass(frozen=True)
class Dense:
    """No compression: one all-reduce of the mean in the gradient's own dtype, as DDP does by itself."""

    ignores_shapes: ClassVar[bool] = True
    averages: ClassVar[bool] = True  # nothing but the mean: a reducer may scale gradients while it copies them

    def init(self, layout: Layout) -> None:
        """Nothing to remember."""

    def reduce(self, grad: Tensor, state: None, residual: Residual | None = None) -> Program[Tensor]:
        """The exact mean; flushes the residual."""
        if residual is not None:
            grad.add_(residual.before)
            residual.after.zero_()
        return (yield from all_reduce(grad, exact=True))
