"""The largest chunks only."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import kernels
from ...kernels import Residual
from ..protocol.compressor import Traits
from ..protocol.layout import Layout, working_dtype
from ..protocol.registry import register
from ..protocol.requests import Program, all_reduce
from .blocks import average_blocks, chosen_of, in_blocks


@register(
    "chunktopk", error_feedback=0.7, traits=Traits(takes_16_bits=True, ignores_shapes=True, forgets_what_it_sends=True)
)
@dataclass(frozen=True)
class ChunkTopK:
    """The chunks of largest norm over all ranks, chosen and averaged by two all-reduces; the rest waits in the residual.

    Sun et al. 2019, GradientFlow, coarse-grained sparse communication. The norm of a chunk is its root mean square,
    averaged over ranks; of equal norms the lower index wins. `ratio`: the part of a bucket's whole chunks that is sent,
    rounded up; `chunk`: elements of each. The fewer elements behind the last whole chunk are sent at every step.
    """

    ratio: float = 0.01
    chunk: int = 512

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"chunktopk:ratio is above 0 and at most 1, got {self.ratio}")
        if self.chunk < 1:
            raise ValueError(f"chunktopk:chunk is at least 1, got {self.chunk}")

    def init(self, layout: Layout) -> None:
        """Nothing to remember."""

    def reduce(self, grad: Tensor, state: None, residual: Residual | None = None) -> Program[Tensor]:
        """The mean of the chosen chunks, zero elsewhere."""
        values = grad if residual is None else residual.plus(grad)
        chosen, alarm = yield from self._agree(values)
        return (yield from average_blocks(grad, values, chosen, self.chunk, alarm))

    def _agree(self, values: Tensor) -> Program[tuple[Tensor, Tensor | None]]:
        """Ascending indices of the chunks to send, and NaN where the average must not be finite.

        A norm that is not finite comes before all others.
        """
        chunks, _ = in_blocks(values, self.chunk)
        count = chosen_of(len(chunks), self.ratio)
        if count == len(chunks):
            return torch.arange(count, device=values.device), None
        norms = torch.linalg.vector_norm(chunks, dim=1, dtype=working_dtype(values.dtype))
        root_mean_squares = norms.div_(math.sqrt(self.chunk))  # 16 bits hold these
        alarm = _alarm(values, root_mean_squares)
        norms = yield from all_reduce(root_mean_squares)
        return norms.sort(descending=True, stable=True).indices[:count].sort().values, alarm


def _alarm(values: Tensor, norms: Tensor) -> Tensor | None:
    """NaN where an element is not finite, and may lie in no chosen chunk; squares of large numbers are not finite either."""
    if norms.device.type == "cpu" and norms.isfinite().all():
        return None
    return torch.where(kernels.all_finite(values), 0.0, torch.nan)
