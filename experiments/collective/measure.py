"""The measurement on one rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from rich.progress import Progress

from ...ddp_core import largest_and_sum, start_all_gather, start_all_to_all, start_scatter, start_sum
from ..network.lab import labels
from ..network.link import parse_rate
from ..results.sizes import elements_of
from ..results.statistics import percentiles
from .config import CollectiveConfig, Operation

BYTES = 4  # of a float32
WARM_UP = 10  # one in so many pieces goes before the clock starts
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}  # of all numbers over the network
Row: TypeAlias = dict[str, Any]
Start: TypeAlias = Callable[[dist.ProcessGroup], dist.Work | None]
Sample: TypeAlias = tuple[float, float]  # seconds until the last rank was done, and of all ranks' processors


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
    """What begins the operation on each piece; where ranks have a block each, these are rounded up to whole numbers."""
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
    return largest_and_sum(found, time.process_time() - began, group, device)


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
    rate, local = parse_rate(config.netlab.rate), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return {
        "seconds": measured,
        "processor_seconds": percentiles([sample[1] for sample in samples]),
        "bytes_per_second": payload / measured["p50"],
        "bus_bytes_per_second": passed * (ranks - 1) / ranks,
        "link_share": passed * (ranks - local) / ranks / rate if rate else None,
        "labels": labels(),
    }
