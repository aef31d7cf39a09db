"""Random data that looks like gradients."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_POOL, SMALLEST_POOL = 2**24, 2**16  # numbers
SCALE = 1e-3


class HeavyTail:
    """Random numbers with a heavy tail, drawn once; whatever is filled takes other windows of them.

    A normal times a log-normal number, on `device`: kurtosis near 160, the largest of a bucket thousands of times the
    median. `elements`: of the largest tensor to be filled. The generator is private; `restart` repeats what it gave.
    """

    def __init__(self, elements: int, device: torch.device) -> None:
        self._generator = torch.Generator()
        self.restart(0)
        size = min(LARGEST_POOL, max(SMALLEST_POOL, 2 * elements))
        normal, exponent = torch.randn(2, size, generator=self._generator)
        self._floats = normal.mul_(exponent.exp_()).mul_(SCALE).to(device)
        self._bytes = torch.randint(256, (size,), generator=self._generator, dtype=torch.uint8).to(device)

    def restart(self, seed: int) -> None:
        """Give from now on what was given after the last restart with this seed."""
        self._generator.manual_seed(seed)

    def fill(self, tensor: Tensor) -> None:
        """Fill a contiguous tensor: bytes with random bits, all else with numbers of the heavy tail."""
        pool = self._bytes if tensor.dtype == torch.uint8 else self._floats
        for piece in tensor.view(-1).split(pool.numel() // 2):
            windows = pool.numel() - piece.numel() + 1
            start = int(torch.randint(windows, (), generator=self._generator))
            piece.copy_(pool[start : start + piece.numel()])

    def positions(self, count: int, length: int, out: Tensor) -> None:
        """Fill `out` (..., count) with positions below `length`, ascending, all different in a row."""
        strata = torch.arange(count, dtype=torch.float64)
        jitter = torch.rand(out.shape, generator=self._generator, dtype=torch.float64)
        out.copy_((strata + jitter).mul_(length / count).clamp_(max=length - 1))


def poison(tensor: Tensor) -> None:
    """Fill with what no implementation may leave there: NaN, or all bits set where there is none."""
    tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
