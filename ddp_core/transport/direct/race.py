"""The choice of a direct way or Gloo's for a collective of a size: the winner of a race between them on this network."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from .collectives import GLOO, PINNED, Collectives

Kind: TypeAlias = Literal["all_gather", "all_to_all", "reduce_scatter"]
REPEATS = 5  # in turns, of which a way's median counts: what is fastest once is not what is fast
WORTHWHILE = 0.98  # of Gloo's seconds: what a direct way has to stay below
CLASS = 4  # a race stands for sizes up to so many times the last
SMALLEST_RACE, LARGEST_RACE = 2**16, 2**26  # bytes of all ranks' blocks; what is larger goes the way of the largest


class Race:
    """The winners of races, each held when its size is first asked for; all ranks ask for the same ones in the same order.

    `gloo`: torch's backend, for one thread at a time. ValueError where the environment names a way that there is not.
    """

    def __init__(self, gloo: Any, direct: Collectives) -> None:
        self._gloo, self._direct = gloo, direct
        self.winners: dict[tuple[Kind, int], str] = {}  # by kind and the bytes of the race

    def way(self, kind: Kind, size: int) -> str | None:
        """For a collective of so many bytes of all ranks together; None is Gloo's. It may hold a race, and then blocks."""
        race = race_bytes(size)
        if (kind, race) not in self.winners:
            self.winners[kind, race] = self._winner(kind, race)
        winner = self.winners[kind, race]
        return None if winner == GLOO else winner

    def _winner(self, kind: Kind, size: int) -> str:
        """Whose slowest rank is fastest, Gloo where nothing is clearly faster; or the one that is pinned."""
        if pinned := os.environ.get(PINNED):
            if pinned != GLOO and pinned not in (ways := self._direct.ways()):
                raise ValueError(f"{PINNED} is {pinned!r}, and here there are: {', '.join([GLOO, *ways])}")
            return pinned
        runs = self._runs(kind, size)
        for run in runs.values():
            run()  # opens what is opened once
        turns = torch.tensor(
            [[self._seconds(run) for run in runs.values()] for _ in range(REPEATS)], dtype=torch.float64
        )
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._gloo.allreduce([turns], options).wait()
        seconds = turns.median(0).values
        seconds[0] *= WORTHWHILE
        return list(runs)[int(seconds.argmin())]

    def _seconds(self, run: Callable[[], object]) -> float:
        """Return the seconds of one run that all ranks begin together."""
        self._gloo.barrier().wait()
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    def _runs(self, kind: Kind, size: int) -> Mapping[str, Callable[[], object]]:
        direct, ranks = self._direct, self._gloo.size()
        numel = max(1, size // torch.float32.itemsize // ranks)
        whole, others, block = torch.zeros(ranks * numel), torch.zeros(ranks * numel), torch.zeros(numel)
        rows = whole.view(ranks, -1).unbind()
        of_gloo, arguments = {
            "all_gather": (lambda: self._gloo._allgather_base(whole, block).wait(), (rows, block)),
            "all_to_all": (
                lambda: self._gloo.alltoall_base(whole, others, [], [], dist.AllToAllOptions()).wait(),
                (rows, others.view(ranks, -1).unbind()),
            ),
            "reduce_scatter": (lambda: self._gloo._reduce_scatter_base(block, whole).wait(), (block, rows)),
        }[kind]
        start: Callable[..., Future[None]] = getattr(direct, kind)
        return {GLOO: of_gloo} | {way: lambda way=way: start(way, *arguments).result() for way in direct.ways()}


def race_bytes(size: int) -> int:
    """The size that the race for `size` is held with, both in bytes of all ranks' blocks.

    >>> [race_bytes(size) for size in (1, 2**16, 2**16 + 1, 2**30)]
    [65536, 65536, 262144, 67108864]
    """
    race = SMALLEST_RACE
    while race < min(size, LARGEST_RACE):
        race *= CLASS
    return race
