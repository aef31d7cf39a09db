"""The parameters that any rank used: a bitmap, added up beside the buckets (Li et al. 2020, section 3.2.3)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cache, cached_property

import torch

from ...compress import AllReduce
from ..transport.collectives import telling
from ..transport.protocol import Transport


class Usage:
    """The sum over ranks of `mine`: by index, 1 for the parameters that this rank used, else 0.

    Made by all ranks at the same place between the same buckets. It is on its way at once, and waited for where the
    answer matters; on CUDA a stream of its own keeps that wait off the backward's kernels.
    """

    def __init__(self, mine: Sequence[int], transport: Transport, device: torch.device, timeout: timedelta) -> None:
        self._mine, self._group, self._timeout = bytes(mine), transport.group, timeout
        self._all_here = all(mine)
        self._stream = _side_stream(device) if device.type == "cuda" else None
        with self._on_stream():
            told = torch.tensor(list(mine), dtype=torch.int32, device="cpu", pin_memory=self._stream is not None)
            self._pending = transport.message(AllReduce(told.to(device, non_blocking=True), "sum"))

    def by_any(self) -> Sequence[int]:
        """By index, above 0 for the parameters that any rank used. Waits, unless this rank used all."""
        return self._mine if self._all_here else self.counts

    @cached_property
    def counts(self) -> Sequence[int]:
        """By index, how many ranks used a parameter. Waits."""
        with self._on_stream(), telling("the parameters that they used", self._group):
            return self._pending.wait(self._timeout).tolist()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
