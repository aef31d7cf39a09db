"""`gradwire collective`: how long all-reduces take, by the size of the pieces (figure 2 of Li et al. 2020)."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from ..ddp_core import start_sum
from .network.lab import NetlabConfig, backend_here, check_lab, labels, rerun_on_hosts
from .ranks.device import chosen_backend, device_here
from .ranks.group import joined
from .ranks.launchers import adopt_launcher
from .ranks.processes import supervised
from .ranks.stopping import sigterm_interrupts
from .results.files import check_file, write_figures
from .results.progress_bar import progress_bar
from .results.statistics import percentiles

UNITS = {"k": 10**3, "M": 10**6, "G": 10**9}
BYTES = 4  # of a float32
WARM_UP = 10  # one in so many pieces goes before the clock starts
Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class CollectiveConfig:
    """Average a number of elements over ranks in pieces of each size: all start at once, then all are awaited."""

    nproc: int = 2
    """ranks on this machine (the launcher's own number where one starts the ranks)"""
    backend: Literal["auto", "gloo", "nccl", "gloo-cuda"] = "auto"
    """process group; auto is nccl with a GPU for every rank and no lab, else gloo; with gloo-cuda ranks can share GPUs"""
    elements: list[str] = field(default_factory=lambda: ["1k", "10k", "100k", "1M", "10M"])
    """float32 numbers in a piece"""
    total: str = "60M"
    """float32 numbers in all"""
    repeats: int = 3
    """of each measurement"""
    netlab: NetlabConfig = field(default_factory=NetlabConfig)
    """hosts on this machine, joined by links of a set rate, in place of nproc ranks"""
    threads: int = 1
    """torch threads a rank"""
    timeout: float = 300.0
    """seconds that any wait for other ranks may take"""
    json: str | None = None
    """file to write all figures to"""

    def __post_init__(self) -> None:
        for name in ("nproc", "repeats", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, got {getattr(self, name)}")
        if not self.timeout > 0:
            raise ValueError(f"timeout is above 0, got {self.timeout}")
        check_lab(self.netlab)
        backend_here(self.backend, hosts=self.netlab.hosts)
        if not self.elements:
            raise ValueError("elements is empty: name at least one size, such as 1k or 1M")
        total = elements_of(self.total)
        for size in self.elements:
            if elements_of(size) > total:
                raise ValueError(f"a piece of {size} is larger than the total of {self.total}")
        check_file("json", self.json)


def elements_of(text: str) -> int:
    """A number of elements from its text, in powers of ten.

    >>> elements_of("60M"), elements_of("100")
    (60000000, 100)
    """
    unit = UNITS.get(text[-1:], 1)
    try:
        count = round(float(text[:-1] if unit > 1 else text) * unit)
    except (ValueError, OverflowError):
        raise ValueError(f"sizes are numbers of elements such as 100, 10k or 1M, got {text!r}") from None
    if count < 1:
        raise ValueError(f"sizes are at least 1 element, got {text}")
    return count


def collective(config: CollectiveConfig) -> int:
    """Measure, show and write, where it ends early what was measured until then; the command's exit code."""
    if (code := rerun_on_hosts(config.netlab)) is not None:
        return code
    launcher = adopt_launcher()
    backend = chosen_backend(backend_here(config.backend), int(os.environ.get("LOCAL_WORLD_SIZE", config.nproc)))
    if launcher:
        _inside_launcher(config, backend)
        return 0
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        file = Path(folder) / "rows"
        file.touch()
        code = supervised(_rank, config.nproc, config, backend, partial(_append, file))
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    _show_and_write(config, rows)
    return code


def _append(file: Path, row: Row) -> None:
    """Keep a row where the process that started this one finds it, however this one ends."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")


def _inside_launcher(config: CollectiveConfig, backend: str) -> None:
    """This process is a rank already."""
    rows: list[Row] = []
    try:
        with sigterm_interrupts():
            _rank(int(os.environ["RANK"]), None, config, backend, rows.append)
    finally:
        _show_and_write(config, rows)


def _rank(
    rank: int,
    rendezvous: dict[str, Any] | None,
    config: CollectiveConfig,
    backend: str,
    keep: Callable[[Row], None],
) -> None:
    """All sizes on this rank; rank 0 keeps each row as soon as it is there."""
    torch.set_num_threads(config.threads)
    device = device_here(backend, rank)
    bar = progress_bar(Console(quiet=rank > 0))
    with joined(backend, timedelta(seconds=config.timeout), rendezvous) as group, bar:
        for row in _rows(config, group, device, bar):
            if rank == 0:
                keep({**row, "backend": backend})


def _rows(config: CollectiveConfig, group: dist.ProcessGroup, device: torch.device, bar: Progress) -> Iterator[Row]:
    total = elements_of(config.total)
    values = torch.zeros(total, device=device)
    sizes = list(dict.fromkeys(map(elements_of, config.elements)))
    shown = bar.add_task("", total=len(sizes) * config.repeats)
    for size in sizes:
        bar.update(shown, description=f"pieces of {size:,}")
        pieces = values.split(size)
        seconds(pieces[: max(1, len(pieces) // WARM_UP)], group)
        measured = percentiles([_repeat(pieces, group, bar, shown) for _ in range(config.repeats)])
        yield {
            "operation": "all_reduce",
            "world_size": group.size(),
            "elements": size,
            "total_elements": total,
            "pieces": len(pieces),
            "seconds": measured,
            "bytes_per_second": total * BYTES / measured["p50"],
            "labels": labels(),
        }


def _repeat(pieces: tuple[torch.Tensor, ...], group: dist.ProcessGroup, bar: Progress, shown: TaskID) -> float:
    found = seconds(pieces, group)
    bar.advance(shown)
    return found


def seconds(pieces: tuple[torch.Tensor, ...], group: dist.ProcessGroup) -> float:
    """Seconds until the all-reduces of all pieces, started one after the other without waiting, have ended."""
    dist.barrier(group)
    began = time.perf_counter()
    works = [start_sum(piece, group) for piece in pieces]
    for work in works:
        work.wait()
    if pieces[0].is_cuda:
        torch.cuda.synchronize(pieces[0].device)
    return time.perf_counter() - began


def _show_and_write(config: CollectiveConfig, rows: Sequence[Row]) -> None:
    """Show and write what was measured, if anything."""
    if not rows:
        return
    Console().print(_table(rows))
    if config.json:
        write_figures("collective", config, rows, config.json)


def _table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    title = f"all-reduce of {first['total_elements']:,} float32, {first['world_size']} ranks, {first['backend']}"
    table = Table(title=", ".join([title, *first["labels"]]), title_justify="left")
    for heading in ("elements", "pieces", "p50", "p95", "MB/s"):
        table.add_column(heading, justify="right")
    for row in rows:
        times = [f"{row['seconds'][name]:.3f} s" for name in ("p50", "p95")]
        table.add_row(f"{row['elements']:,}", f"{row['pieces']:,}", *times, f"{row['bytes_per_second'] / 1e6:.0f}")
    return table
