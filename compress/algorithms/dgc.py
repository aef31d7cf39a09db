"""The largest elements of what momentum has summed up."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import Residual
from ..protocol.compressor import Traits
from ..protocol.layout import Layout
from ..protocol.registry import register
from ..protocol.requests import AllGather, Program
from ..state.tensors import Counter, PerParameter
from .topk import TopK

WARM_UP_RATIOS = (
    0.25,
    0.0625,
    0.015625,
    0.004,
)  # section 3.3: four epochs of 75 %, 93.75 %, 98.4375 % and 99.6 % sparsity


@dataclass
class DGCState:
    """The momentum of this rank's gradients, the sum of it that was not sent, the ranks, and the steps seen."""

    velocity: PerParameter
    residual: PerParameter
    world_size: int
    step: Counter


@register("dgc", lossy=False, traits=Traits(takes_16_bits=True, packs_bytes=True, needs_all_parameters=True))
@dataclass(frozen=True)
class DGC:
    """Top-k of the sum of each rank's momentum; what was sent starts anew in both. The optimizer runs without momentum.

    Lin et al. 2018, Deep Gradient Compression. u = `momentum` u + gradient, v = v + u; the `ratio` of a bucket's elements
    where v is largest is sent, and set to zero in u (momentum factor masking) and v. `warmup_steps`: before that many steps
    more is sent: a quarter, a 16th, a 64th and a 250th of the elements, a fourth of the time each. `clip`: a rank's gradient
    of a bucket is scaled down to this norm over the root of the number of ranks; `none` clips nothing.
    """

    ratio: float = 0.001
    momentum: float = 0.9
    warmup_steps: int = 0
    clip: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"dgc:ratio is above 0 and at most 1, got {self.ratio}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"dgc:momentum is at least 0 (none) and below 1, got {self.momentum}")
        if self.warmup_steps < 0:
            raise ValueError(f"dgc:warmup_steps is at least 0, got {self.warmup_steps}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"dgc:clip is above 0, or none; got {self.clip}")

    def init(self, layout: Layout) -> DGCState:
        """No momentum, and nothing that waits."""
        velocity = PerParameter.zeros(layout.widened(), of_gradients=True)
        return DGCState(
            velocity, PerParameter.zeros(layout.widened(), residual=True), layout.ranks.world_size, Counter()
        )

    def reduce(self, grad: Tensor, state: DGCState, residual: Residual | None = None) -> Program[Tensor]:
        """The mean over ranks of what each sends; an outer residual goes into the sum."""
        if not grad.numel():
            return grad
        codec, length = TopK(self._ratio(state.step.value)), grad.numel()
        state.step.value += 1
        velocity, sums = self._add(grad, state, residual)
        rows = torch.zeros(1, codec.row_bytes(length), dtype=torch.uint8, device=grad.device)
        codec.encode(grad.zero_(), Residual(sums, sums), rows, length)
        velocity.index_fill_(0, codec.indices(rows, length), 0)
        gathered = yield AllGather(rows)
        codec.decode(gathered, grad, length, sums)
        return grad

    def _add(self, grad: Tensor, state: DGCState, residual: Residual | None) -> tuple[Tensor, Tensor]:
        """The new momentum, and the sum with it in."""
        before, velocity = state.velocity.update()
        torch.add(self._clipped(grad, state.world_size), before, alpha=self.momentum, out=velocity)
        before, sums = state.residual.update()
        torch.add(before, velocity, out=sums)
        if residual is not None:
            sums.add_(residual.before)
            residual.after.zero_()
        return velocity, sums

    def _clipped(self, grad: Tensor, world_size: int) -> Tensor:
        if self.clip is None:
            return grad
        norm = torch.linalg.vector_norm(grad, dtype=torch.float64)
        limit = self.clip / math.sqrt(world_size)
        return grad * torch.where(norm > limit, limit / norm, 1.0).to(grad.dtype)

    def _ratio(self, step: int) -> float:
        """Return the part of the elements that a step sends."""
        if step >= self.warmup_steps:
            return self.ratio
        return max(self.ratio, WARM_UP_RATIOS[step * len(WARM_UP_RATIOS) // self.warmup_steps])
