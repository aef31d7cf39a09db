"""`gradwire bench`: the benchmark on ranks that a launcher has started, or on ranks of its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from ...compress import compressor, warm_up_steps
from ...ddp_core import adopt_launcher
from ..network.interfaces import interfaces
from ..network.lab import backend_here, rerun_on_hosts
from ..network.link import over_link
from ..ranks.device import chosen_backend, device_here, shared_gpus, unused_gpus
from ..ranks.launchers import lab_here, threads_here
from ..ranks.processes import supervised
from ..results.files import figures_document, write_json
from ..results.progress_bar import progress_bar
from .config import BenchConfig
from .models import Task
from .rows import KIND, Placement, row
from .run import measure, world_sizes
from .show import PLAIN, common, filled, header, late, table
from .trial import Setup
from .world import World, join_world

TABLE_WIDTH = 160  # columns, at least, for a table that is not to be cut


def bench_command(config: BenchConfig) -> int:
    """Run the benchmark; the command's exit code. What can be refused is refused before any rank starts."""
    if (code := rerun_on_hosts(config.slowed_netlab)) is not None:
        return code
    launcher = adopt_launcher()
    for task in config.tasks():
        with torch.device("meta"):
            task.build()
    ranks = int(os.environ["WORLD_SIZE"]) if launcher else config.nproc
    if too_large := [each for each in config.world_sizes if each > ranks]:
        raise ValueError(f"world_sizes has {too_large[0]}, and there are {ranks} ranks")
    wanted = backend_here(config.backend, config.link)
    backend = chosen_backend(wanted, int(os.environ.get("LOCAL_WORLD_SIZE", config.nproc)))
    if launcher:
        torch.set_num_threads(threads_here(config.threads, config.nproc))
        run_rank(config, backend, "netlab" if lab_here() else launcher, None)
        return 0
    return supervised(rank_main, config.nproc, config, backend)


def rank_main(rank: int, rendezvous: dict[str, Any], config: BenchConfig, backend: str) -> None:
    """A rank that `bench` started."""
    os.environ.setdefault("LOCAL_RANK", str(rank))
    torch.set_num_threads(threads_here(config.threads, config.nproc))
    run_rank(config, backend, "gradwire", rendezvous)


def run_rank(config: BenchConfig, backend: str, launcher: str, rendezvous: dict[str, Any] | None) -> None:
    """All models on this rank; rank 0 shows and writes."""
    about = (int(os.environ.get("LOCAL_RANK", 0)), socket.gethostname())
    world = join_world(rendezvous, backend, device_here(backend), timedelta(seconds=config.timeout), about)
    document = _document(config, world, launcher)
    sizes = world_sizes(config, world)
    console = Console(quiet=world.rank > 0)
    console.print(*header(document), *_warnings(config, backend), sep="\n", **PLAIN)
    path = config.json if world.rank == 0 else None
    _keep(document, path, [])  # so that an earlier run's file is not taken for this one's
    for task in config.tasks():
        for rows in _models_rows(task, sizes, config, world, console):
            _keep(document, path, rows)
    if config.json:
        console.print(f"figures    {config.json}", **PLAIN)
    world.leave()


def _keep(document: dict[str, Any], path: str | None, rows: Sequence[dict[str, Any]]) -> None:
    document["rows"] += rows
    if path is not None:
        write_json(document, path)


def _document(config: BenchConfig, world: World, launcher: str) -> dict[str, Any]:
    """All of the file but the rows."""
    document = figures_document(KIND, config, [])
    document["labels"] = config.labels()
    document["environment"] |= {
        "cuda": torch.version.cuda,
        "backend": world.backend,
        "device": world.device.type,
        "world_size": world.size,
        "launched_by": launcher,
        "hosts": sorted(set(world.hosts)),
        "threads": torch.get_num_threads(),
        "interfaces": interfaces(),
    }
    return document


def _warnings(config: BenchConfig, backend: str) -> Iterator[str]:
    """Yield warnings of what the figures do not show."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", config.nproc))
    yield from filter(None, (unused_gpus(backend), shared_gpus(backend, local)))
    turns = config.warmup
    for spec in config.compressors:
        if (steps := warm_up_steps(compressor(spec))) > turns:
            yield f"{spec} compresses after {steps} steps, and --warmup is {turns}: some of its figures are of its warm-up"
    if "torch" in config.ddp and config.link:
        yield "an emulated link delays gradwire's messages: torch's DDP sends through gradwire's none"


def _models_rows(
    task: Task, sizes: Sequence[int], config: BenchConfig, world: World, console: Console
) -> Iterator[list[dict[str, Any]]]:
    """The rows of a model, world size by world size, then shown."""
    cases = config.cases()
    title = f"\nBenchmark: {task.size} with batch size {_batch_size(task, config)}, {common(cases)}"
    console.print(title, *config.labels(), sep="\n", **PLAIN)
    shown: list[dict[str, Any]] = []
    with progress_bar(console) as bar:
        for count in sizes:
            rows = list(_rows(task, world.placement(count), config, world, bar))
            shown += rows
            yield rows
    Console(quiet=console.quiet, width=max(console.width, TABLE_WIDTH)).print(table(shown, cases))
    console.print(*filled(shown), *late(shown, cases), sep="\n", **PLAIN)


def _batch_size(task: Task, config: BenchConfig) -> int:
    return task.batch_size or config.batch_size


def _rows(
    task: Task, placement: Placement, config: BenchConfig, world: World, bar: Progress
) -> Iterator[dict[str, Any]]:
    """The rows of a model on some of the ranks; none on those that wait."""
    count = placement.world_size
    name = f"{task.name} on {count} ranks"
    if world.rank >= count:
        world.wait(name)
        return
    chosen = config.cases_on(count)
    shown = bar.add_task(name, total=len(chosen) * (config.warmup + config.steps))

    def advance(turn: int) -> None:
        bar.advance(shown)
        world.heartbeat(name, turn)

    transport = over_link(config.slowed_link)
    setup = Setup(task, _batch_size(task, config), config.seed, world.device, world.timeout, transport)
    with world.joined(count, name):
        for case, measured in measure(chosen, setup, config, world, advance):
            yield row(task.name, setup.batch_size, case, placement, measured, config)
    bar.remove_task(shown)
