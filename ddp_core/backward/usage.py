"""Which parameters any rank used: a bitmap, added up beside the buckets (Li et al. 2020, section 3.2.3)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from ..transport.collectives import start_sum
from ..transport.processes import explained


class Usage:
    """The sum over ranks of `mine`: by index, 1 for the parameters that this rank used, else 0.

    Made by all ranks at the same place between the same buckets. It is on its way at once, and waited for where the
    answer matters; on CUDA a stream of its own keeps that wait off the backward's kernels.
    """

    def __init__(
        self, mine: Sequence[int], group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None
    ) -> None:
        self._mine, self._group = bytes(mine), group
        self._answer: Sequence[int] | None = None
        self._timeout = timeout
        self._stream = _side_stream(device) if device.type == "cuda" else None
        with self._on_stream():
            told = torch.tensor(list(mine), dtype=torch.int32, device="cpu", pin_memory=self._stream is not None)
            self._shares = told.to(device, non_blocking=True)
            self._work = start_sum(self._shares, group)

    def by_any(self) -> Sequence[int]:
        """By index, above 0 for the parameters that any rank used. Waits, unless this rank used all."""
        if self._answer is None:
            self._answer = self._mine if all(self._mine) else self._waited()
        return self._answer

    def counts(self) -> Tensor:
        """By index, how many ranks used a parameter. Waits."""
        self._waited()
        return self._shares

    def _waited(self) -> Sequence[int]:
        with self._on_stream():
            try:
                if self._timeout is None or self._stream is not None:
                    self._work.wait()
                else:
                    self._work.wait(self._timeout)
            except RuntimeError as error:
                raise RuntimeError(
                    f"the ranks did not tell each other which parameters they used: one has died, hangs, or raised an "
                    f"error in its backward. {explained(error, self._group)}"
                ) from error
            return self._shares.tolist()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
