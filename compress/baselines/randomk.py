"""Random blocks only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ... import kernels
from ...kernels import Residual
from ..algorithms.shared_random import seeded_generator
from ..protocol.compressor import Traits
from ..protocol.layout import Layout
from ..protocol.registry import register
from ..protocol.requests import Program
from ..state.tensors import Counter
from .blocks import average_blocks, chosen_of


@dataclass
class RandomKState:
    """The name that a bucket's random numbers depend on, the number of its whole blocks, and the steps seen."""

    name: str
    blocks: int
    step: Counter


@register(
    "randomk", error_feedback=0.7, traits=Traits(takes_16_bits=True, ignores_shapes=True, forgets_what_it_sends=True)
)
@dataclass(frozen=True)
class RandomK:
    """Blocks chosen at random, the same on all ranks, in one all-reduce of values alone; the rest waits in the residual.

    Stich, Cordonnier, Jaggi 2018, rand-k with memory, over blocks instead of elements. `ratio`: the part of a bucket's
    whole blocks that is sent, rounded up; `block`: elements of each. The fewer elements behind the last whole block are
    sent at every step. `seed`: of the private generators, one a step and bucket. Nothing is scaled up: without error
    feedback the average is `ratio` of the gradient in expectation.
    """

    ratio: float = 0.01
    block: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"randomk:ratio is above 0 and at most 1, got {self.ratio}")
        if self.block < 1:
            raise ValueError(f"randomk:block is at least 1, got {self.block}")

    def init(self, layout: Layout) -> RandomKState:
        """No steps seen yet."""
        return RandomKState(layout.names[0], layout.numel // self.block, Counter())

    def reduce(self, grad: Tensor, state: RandomKState, residual: Residual | None = None) -> Program[Tensor]:
        """The mean of this step's blocks, zero elsewhere."""
        values = grad if residual is None else residual.plus(grad)
        chosen = self._chosen(state, grad.device)
        state.step.value += 1
        alarm = torch.where(kernels.all_finite(values), 0.0, torch.nan)  # what is not finite may lie in no chosen block
        return (yield from average_blocks(grad, values, chosen, self.block, alarm))

    def _chosen(self, state: RandomKState, device: torch.device) -> Tensor:
        """Ascending indices of distinct blocks, drawn on the CPU so that all devices draw alike."""
        count = chosen_of(state.blocks, self.ratio)
        if device.type == "meta":
            return torch.empty(count, dtype=torch.int64, device=device)
        generator = seeded_generator(self.seed, state.step.value, state.name)
        order = torch.randperm(state.blocks, generator=generator, device="cpu")
        return order[:count].sort().values.to(device, non_blocking=True)
