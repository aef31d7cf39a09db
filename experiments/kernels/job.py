"""A job of the benchmark: its buffers, the operations to time, and the same by torch's operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .heavy_tail import HeavyTail, poison


@dataclass(frozen=True)
class Output:
    """A result of a run; `exact`: the same bits from every implementation, not the same up to rounding."""

    name: str
    values: Tensor
    exact: bool = False


@dataclass
class Job:
    """Work on one bucket.

    `baseline` says how torch's operators do it. `floor_bytes`: the fewest bytes that must move between memory and processor.
    `run`: the job by the operations of `gradwire.kernels`; `run_baseline`: by torch's operators; `results`: what
    implementations must agree on, after a run; `prepare`: what comes before a run besides fresh inputs.
    """

    baseline: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    floor_bytes: float
    run: Callable[[], object]
    run_baseline: Callable[[], object]
    results: Callable[[], list[Output]]
    prepare: Callable[[HeavyTail], object] = bool

    def refill(self, numbers: HeavyTail) -> None:
        """Fresh inputs, poisoned outputs: before each run."""
        for tensor in self.inputs:
            numbers.fill(tensor)
        for tensor in self.outputs:
            poison(tensor)
        self.prepare(numbers)


def inputs(elements: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A gradient and its residual, which has 32 bits."""
    return torch.zeros(elements, dtype=dtype, device=device), torch.zeros(elements, device=device)


def whole_blocks(elements: int, block: int) -> int:
    """`elements` rounded up to whole blocks."""
    return -(-elements // block) * block
