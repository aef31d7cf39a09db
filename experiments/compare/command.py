"""`gradwire compare`: the same training with each compressor, side by side."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ...compress import compressor, warm_up_steps
from ...ddp_core import adopt_launcher
from ..network.lab import backend_here, labels, rerun_on_hosts
from ..network.link import over_link, shown_rate
from ..ranks.device import chosen_backend, device_here, device_of, shared_gpus, unused_gpus
from ..ranks.group import joined
from ..ranks.launchers import lab_here, threads_here
from ..ranks.processes import supervised
from ..results.comparison import NO_LINK, ONE_PROCESS, SIMULATED, Results, RunResult, ranks_on
from ..results.files import command_line, environment, prepared_folder
from ..results.loggers import check_loggers, log
from ..results.optional import optional_files
from ..results.report import write_report
from ..results.seeds import over_seeds, seeds_table
from ..results.table import table
from ..results.time_to_loss import steps_behind
from ..results.verdict import filled, losses, recommendation
from ..workloads.checkpoint import Checkpoint
from ..workloads.data import Dataset, load_dataset
from ..workloads.history import Steps
from ..workloads.models import build_model
from ..workloads.simulated import train_simulated
from ..workloads.simulated_sites import train_simulated_sites
from ..workloads.training import Report, train
from ..workloads.turns import Training, in_turns
from .config import CompareConfig

logger = logging.getLogger(__name__)
RESULTS = "results.json"
TABLE_WIDTH = 132  # columns, so that no cell breaks
Trainer: TypeAlias = Callable[[str, str | None, CompareConfig, Report], Training]  # of a compressor, a link and a seed
OF_NO_RESULT = ("out", "logger", "compressors", "checkpoints")  # options that change no training
PROGRESS = (  # a bar for each compressor, with the seconds of its training so far
    TextColumn("{task.description}"),
    BarColumn(bar_width=30),
    MofNCompleteColumn(),
    TextColumn("{task.fields[loss]}"),
    TextColumn("{task.fields[seconds]:.1f} s"),
)
WRITTEN = (RESULTS, "loss.png", "tradeoff.png", "report.html")  # in the output folder, at the end or on the way


def compare(config: CompareConfig) -> int:
    """Run the comparison and show it; the command's exit code. Everything that can be refused is refused first."""
    check_loggers(config.logger)
    if (code := rerun_on_hosts(config.netlab)) is not None:
        return code
    launcher = None if config.simulated else adopt_launcher()
    dataset = load_dataset(config.data, config.model)
    with torch.device("meta"):
        build_model(config.model, dataset)
    ranks = int(os.environ["WORLD_SIZE"]) if launcher else config.nproc
    dataset.train_batches(config.batch_size, seed=config.seed, rank=0, world_size=ranks)  # refuses too few samples
    if config.simulated:
        return _simulated(config, dataset)
    wanted = backend_here(config.backend, next(filter(None, config.links), None))
    backend = chosen_backend(wanted, int(os.environ.get("LOCAL_WORLD_SIZE", config.nproc)))
    if launcher:
        return _inside_launcher(config, dataset, backend, launcher)
    out = _begun(config, backend, ranks)
    code = supervised(rank_main, config.nproc, config, backend, str(out))
    results = Results.read(out / RESULTS) if (out / RESULTS).exists() else None
    if results is not None and results.runs:
        write_output(results, out)
    return code


def _begun(config: CompareConfig, backend: str, ranks: int) -> Path:
    """The output folder, once nothing of an earlier run can be taken for this one's, and the user knows what starts."""
    out = prepared_folder(config.out or time.strftime("runs/%Y-%m-%d-%H%M%S"))
    for name in WRITTEN:
        (out / name).unlink(missing_ok=True)
    where = ranks_on(ranks, backend, device_of(backend), _network(config))
    start = f"{where}, {len(config.compressors)} compressors, results in {out}"
    Console().print(start, markup=False)
    for warning in _warnings(config, backend):
        logger.warning(warning)
    return out


def _warnings(config: CompareConfig, backend: str) -> Iterator[str]:
    """Yield warnings of what the user may not expect."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", config.nproc))
    yield from filter(None, (unused_gpus(backend), shared_gpus(backend, local)))
    synced = config.steps // config.sync_every
    for spec in config.compressors if config.parallel == "ddp" else ():
        if (steps := warm_up_steps(compressor(spec))) >= synced:
            yield (
                f"{spec} warms up for {steps} optimizer steps, and the run has {synced}: its warm-up does not end, and "
                "the verdict leaves it out"
            )


def _network(config: CompareConfig) -> str | None:
    """Return the network of all runs, or those of the runs, one after the other."""
    if config.simulated:
        return SIMULATED
    several = len(config.links) > 1
    return ", then ".join(_label(link) or NO_LINK for link in config.links) if several else _label(config.links[0])


def _label(link: str | None) -> str | None:
    return ", ".join(labels(link)) or None


def _inside_launcher(config: CompareConfig, dataset: Dataset, backend: str, launcher: str) -> int:
    """This process is a rank already."""
    torch.set_num_threads(threads_here(config.threads, config.nproc))
    out = _begun(config, backend, int(os.environ["WORLD_SIZE"])) if os.environ["RANK"] == "0" else None
    run_rank(config, dataset, backend, "netlab" if lab_here() else launcher, out, None)
    if out is not None:
        write_output(Results.read(out / RESULTS), out)
    return 0


def _simulated(config: CompareConfig, dataset: Dataset) -> int:
    """All ranks are simulated in this process."""
    if config.threads:
        torch.set_num_threads(config.threads)
    out = _begun(config, ONE_PROCESS, config.nproc)

    def trainer(spec: str, link: str | None, config: CompareConfig, report: Report) -> Training:
        yield from ()  # no turns: its seconds are those of the processor
        if config.local_every:
            return train_simulated_sites(spec, config, dataset, config.nproc, report)
        return train_simulated(spec, config, dataset, config.nproc, report, partial(_checkpoint, config, dataset))

    _run_all(config, _empty_results(config, dataset, ONE_PROCESS, "gradwire", config.nproc), trainer, out)
    write_output(Results.read(out / RESULTS), out)
    return 0


def _checkpoint(config: CompareConfig, dataset: Dataset, ran: str) -> Checkpoint | None:
    """Return the checkpoint of one training, if any is wanted. Another option or text gives another one."""
    if config.checkpoints is None:
        return None
    decides = {name: value for name, value in dataclasses.asdict(config).items() if name not in OF_NO_RESULT}
    return Checkpoint(config.checkpoints, {**decides, "compressor": ran, "data": dataset.summary()})


def rank_main(rank: int, rendezvous: dict[str, Any], config: CompareConfig, backend: str, out: str) -> None:
    """A rank that `compare` started."""
    os.environ.setdefault("LOCAL_RANK", str(rank))
    torch.set_num_threads(threads_here(config.threads, config.nproc))
    dataset = load_dataset(config.data, config.model)
    run_rank(config, dataset, backend, "gradwire", Path(out) if rank == 0 else None, rendezvous)


def run_rank(
    config: CompareConfig,
    dataset: Dataset,
    backend: str,
    launcher: str,
    out: Path | None,
    rendezvous: dict[str, Any] | None,
) -> None:
    """Train with all compressors on this rank; the rank with `out` writes results."""
    device = device_here(backend)
    with joined(backend, timedelta(seconds=config.timeout), rendezvous) as group:

        def trainer(spec: str, link: str | None, config: CompareConfig, report: Report) -> Training:
            pace = over_link(link)
            return train(spec, config, dataset, group, device, report, pace, turns=config.in_turns)

        _run_all(config, _empty_results(config, dataset, backend, launcher, group.size()), trainer, out)


def _run_all(config: CompareConfig, results: Results, trainer: Trainer, out: Path | None) -> None:
    """Train with all compressors on one link and seed after the other; `out` has the results of those that have ended."""
    if out is not None:
        results.write(out / RESULTS)
    seeded = [dataclasses.replace(config, seed=config.seed + more) for more in range(config.seeds)]
    for link, each in product(config.links, seeded):
        with Progress(*PROGRESS, disable=out is None) as bar:
            for runs in _runs(each, link, trainer, bar):
                results = dataclasses.replace(results, runs=(*results.runs, *runs))
                results = dataclasses.replace(results, over_seeds=over_seeds(results))
                if out is not None:
                    results.write(out / RESULTS)
                    for run in runs:
                        log(config.logger, _name(run.compressor, link, each), run, dataclasses.asdict(each), out)


def _runs(config: CompareConfig, link: str | None, trainer: Trainer, bar: Progress) -> Iterator[list[RunResult]]:
    """Yield the runs of one link and seed as they end: all at once where they take turns."""
    at_once = len(config.compressors) if config.in_turns else 1
    reports = [_reporter(bar, _name(spec, link, config), config) for spec in config.compressors]
    pairs = zip(config.compressors, reports, strict=True)
    trainings = [trainer(spec, link, config, report) for spec, report in pairs]
    for first in range(0, len(trainings), at_once):
        yield [_placed(run, link, config) for run in in_turns(trainings[first : first + at_once])]


def _reporter(bar: Progress, name: str, config: CompareConfig) -> Report:
    """Return what shows the steps of one training."""
    task = bar.add_task(name, total=config.steps, loss="", seconds=0.0)

    def report(recent: Steps) -> None:
        mean = sum(loss for _, loss, _ in recent) / len(recent)
        step, _, seconds = recent[-1]
        bar.update(task, completed=step, loss=f"loss {mean:.3f}", seconds=seconds)

    return report


def _placed(run: RunResult, link: str | None, config: CompareConfig) -> RunResult:
    """Return the run with its seed, and its network where there are several."""
    run = dataclasses.replace(run, seed=config.seed)
    return dataclasses.replace(run, network=_label(link) or NO_LINK) if len(config.links) > 1 else run


def _name(spec: str, link: str | None, config: CompareConfig) -> str:
    """Return the name of a run, with its link and its seed if there are several."""
    name = f"{spec}, {shown_rate(link) if link else NO_LINK}" if len(config.links) > 1 else spec
    return f"{name}, seed {config.seed}" if config.seeds > 1 else name


def _empty_results(config: CompareConfig, dataset: Dataset, backend: str, launcher: str, world_size: int) -> Results:
    with torch.device("meta"):
        elements = sum(p.numel() for p in build_model(config.model, dataset).parameters())
    return Results(
        world_size=world_size,
        backend=backend,
        model={"name": config.model.name, "parameters": elements},
        data=dataset.summary(),
        config=dataclasses.asdict(config),
        runs=(),
        command=command_line(),
        environment={
            **environment(),
            "device": device_of(backend),
            "launched_by": launcher,
            "network": _network(config),
        },
    )


def write_output(results: Results, out: Path) -> None:
    """Print a table and a verdict for each network and seed, then draw pictures, write the report, and say where all is.

    Where matplotlib or jinja2 is not installed, a line says so in place of what it is for.
    """
    console = Console(width=max(Console().width, TABLE_WIDTH))
    for network in results.by_network():
        for each in network.by_seed():
            console.print(table(each))
            lines = filter(None, (steps_behind(each), losses(each), filled(each), recommendation(each)))
            console.print(*lines, "", soft_wrap=True, sep="\n")
        if (seeds := seeds_table(network)) is not None:
            console.print(seeds, "")
    say = partial(console.print, sep="", highlight=False, markup=False, soft_wrap=True)
    say("results    ", out / RESULTS)
    pictures, where = optional_files(partial(_drawn, results, out))
    say("pictures   ", where)
    _, where = optional_files(partial(write_report, results, pictures, out / "report.html"))
    say("report     ", where)


def _drawn(results: Results, out: Path) -> Sequence[Path]:
    from ..results.picture import draw  # here, since matplotlib is optional

    return draw(results.by_seed()[0], out)
