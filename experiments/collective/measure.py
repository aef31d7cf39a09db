"""Options of `gradwire collective`, and the measurement on one rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from rich.progress import Progress

from ...compress import AllReduce
from ...ddp_core import ask, over, start_all_gather, start_all_to_all, start_scatter, start_sum
from ...ddp_core.transport.direct.torch_backend import LEAST_TORCH
from ..network.lab import backend_here, labels
from ..network.ranks_config import RanksConfig
from ..results.files import check_file
from ..results.rows import elements_of
from ..results.statistics import percentiles

BYTES = 4  # of a float32
WARM_UP = 10  # one in so many pieces goes before the clock starts
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}  # of all numbers over the network
Operation: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
Row: TypeAlias = dict[str, Any]
Start: TypeAlias = Callable[[dist.ProcessGroup], dist.Work | None]
Sample: TypeAlias = tuple[float, float]  # seconds until the last rank was done, and of all ranks' processors


@dataclass(frozen=True)
class CollectiveConfig(RanksConfig):
    """Move a number of elements over ranks in pieces of each size: all start at once, then all are awaited."""

    backend: Literal["auto", "gloo", "nccl", "gloo-cuda", "gradwire"] = "auto"  # type: ignore[assignment]
    """process group; auto takes nccl if every rank has a GPU and nothing is emulated, else gloo; gloo-cuda lets
    ranks share a GPU"""
    against: list[Literal["gloo", "gradwire"]] = field(default_factory=list)
    """further process groups to compare with, in turns (CPU only)"""
    operations: list[Operation] = field(default_factory=lambda: ["all_reduce"])
    """collectives to time"""
    elements: list[str] = field(default_factory=lambda: ["1k", "10k", "100k", "1M", "10M"])
    """sizes of one message, in float32 numbers: of one rank, or of all ranks for all-gather, reduce-scatter and
    all-to-all"""
    total: str = "60M"
    """float32 numbers in all messages of a size together"""
    pieces: int = 0
    """number of messages of each size; 0 takes as many as the total allows"""
    repeats: int = 3
    """number of repeats of each measurement"""
    threads: int = 1
    """torch threads per rank; 0 divides the cores among the ranks"""
    json: str | None = None
    """write all figures to this file"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repeats < 1:
            raise ValueError(f"repeats is at least 1, got {self.repeats}")
        backend_here(self.backend, hosts=self.netlab.hosts)
        self._check_backends()
        self._check_pieces()
        check_file("json", self.json)

    def _check_backends(self) -> None:
        version = tuple(int(part) for part in torch.__version__.split(".")[:2])
        if "gradwire" in (self.backend, *self.against) and version < LEAST_TORCH:
            needed = ".".join(map(str, LEAST_TORCH))
            raise ValueError(f"the backend gradwire needs torch {needed} or later, and this is {torch.__version__}")
        if self.against and self.backend in ("nccl", "gloo-cuda"):
            raise ValueError(f"against is of process groups on the CPU, and {self.backend} is not: leave one out")

    def _check_pieces(self) -> None:
        if not self.elements:
            raise ValueError("elements is empty: name at least one size, such as 1k or 1M")
        if not self.operations:
            raise ValueError(f"operations is empty: name at least one of {', '.join(get_args(Operation))}")
        if self.pieces < 0:
            raise ValueError(f"pieces is at least 1, or 0 for as many as make up the total; got {self.pieces}")
        total = elements_of(self.total)
        for size in self.elements:
            if elements_of(size) > total and not self.pieces:
                raise ValueError(f"a piece of {size} is larger than the total of {self.total}")


def rows_of(
    config: CollectiveConfig, groups: Mapping[str, dist.ProcessGroup], device: torch.device, bar: Progress
) -> Iterator[Row]:
    """A row for each size, operation and backend; of one size and operation, backends take turns."""
    sizes = list(dict.fromkeys(map(elements_of, config.elements)))
    shown = bar.add_task("", total=len(sizes) * len(config.operations) * len(groups) * config.repeats)
    for size in sizes:
        for operation in config.operations:
            bar.update(shown, description=f"pieces of {size:,}")
            total = config.pieces * size or elements_of(config.total)
            ranks = next(iter(groups.values())).size()
            pieces = pieces_of(operation, size, total, ranks, device)
            for group in groups.values():
                seconds(pieces[: max(1, len(pieces) // WARM_UP)], group)
            samples: dict[str, list[Sample]] = {backend: [] for backend in groups}
            for _ in range(config.repeats):
                for backend, group in groups.items():
                    samples[backend].append(_sample(pieces, group, device))
                    bar.advance(shown)
            for backend, found in samples.items():
                what = {"operation": operation, "world_size": ranks, "elements": size, "total_elements": total}
                yield {**what, "pieces": len(pieces), "backend": backend, **_figures(config, what, found)}


def pieces_of(operation: Operation, size: int, total: int, ranks: int, device: torch.device) -> Sequence[Start]:
    """Return the functions that start the operation on each piece; blocks of ranks are rounded up to whole numbers."""
    if operation == "all_reduce":
        return [partial(start_sum, piece) for piece in torch.zeros(total, device=device).split(size)]
    count, block = -(-total // size), -(-size // ranks)
    wholes, blocks = torch.zeros(count, ranks * block, device=device), torch.zeros(count, block, device=device)
    if operation == "all_to_all":
        return [partial(start_all_to_all, rows, torch.zeros_like(rows)) for rows in wholes]
    pairs = list(zip(wholes, blocks, strict=True))
    if operation == "all_gather":
        return [partial(start_all_gather, whole, part, async_op=True) for whole, part in pairs]
    return [partial(start_scatter, whole, part) for whole, part in pairs]


def _sample(pieces: Sequence[Start], group: dist.ProcessGroup, device: torch.device) -> Sample:
    began = time.process_time()
    found = seconds(pieces, group)
    worked, messages = time.process_time() - began, over(group, device)
    slowest, total = torch.tensor([[found], [worked]], dtype=torch.float64, device=device)
    return ask(AllReduce(slowest, "max"), messages).item(), ask(AllReduce(total, "sum"), messages).item()


def seconds(pieces: Sequence[Start], group: dist.ProcessGroup) -> float:
    """Seconds until the collectives on all pieces, started one after the other without waiting, have ended."""
    dist.barrier(group)
    began = time.perf_counter()
    for work in [start(group) for start in pieces]:
        assert work is not None  # this rank is in the group
        work.wait()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _figures(config: CollectiveConfig, what: Row, samples: Sequence[Sample]) -> Row:
    """Figures of some samples.

    `bus_bytes_per_second`: what a rank must send for it, in a second, as NCCL's tests count. `link_share`: of the rate of a
    lab's links, by what must leave a host.
    """
    ranks, payload = what["world_size"], BYTES * what["total_elements"]
    measured = percentiles([sample[0] for sample in samples])
    passed = PASSES[what["operation"]] * payload / measured["p50"]
    rate, local = config.netlab.slower, int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return {
        "seconds": measured,
        "processor_seconds": percentiles([sample[1] for sample in samples]),
        "bytes_per_second": payload / measured["p50"],
        "bus_bytes_per_second": passed * (ranks - 1) / ranks,
        "link_share": passed * (ranks - local) / ranks / rate if rate else None,
        "labels": labels(),
    }
