"""All settings on the first so many ranks, turn by turn."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist

from ...ddp_core import exchange, over
from ..ranks.launchers import lab_here
from ..workloads.memory import release_free_memory
from .config import BenchConfig
from .rows import PHASES, Case, Measured, Traffic
from .trial import Setup, Trial
from .world import World

COPIES = 6  # of the parameters that a model in training holds: gradients, buckets, momentum, residuals now and before
SHARE = 0.6  # of the free memory that models may take; the rest is for activations
Advance: TypeAlias = Callable[[int], None]  # called after every turn, with its number


def world_sizes(config: BenchConfig, world: World) -> list[int]:
    """The numbers of ranks to measure, ascending.

    Raises ValueError for one that does not divide evenly among its hosts.
    """
    machine = sum(world.placement(count).machines == 1 for count in range(1, world.size + 1))
    doubled = [2**power for power in range(world.size.bit_length())]
    default = [count for count in doubled if count < machine] + [machine * count for count in doubled] + [world.size]
    chosen = sorted({count for count in config.world_sizes or default if count <= world.size})
    uneven = [count for count in chosen if count % world.placement(count).machines]
    if uneven and config.world_sizes:
        machines = world.placement(uneven[0]).machines
        raise ValueError(f"world_sizes has {uneven[0]}, which does not divide evenly among {machines} hosts")
    return [count for count in chosen if count not in uneven]


def measure(
    cases: Sequence[Case], setup: Setup, config: BenchConfig, world: World, advance: Advance
) -> Iterator[tuple[Case, Measured]]:
    """Each setting and what the ranks of the default process group measured of it, one rank after the other.

    A collective call. Settings take turns as far as memory allows; the rest follows.
    """
    group = dist.group.WORLD
    assert group is not None
    control = group if world.backend == "gloo" else dist.new_group(backend="gloo", timeout=setup.timeout)
    assert isinstance(control, dist.ProcessGroup)
    count = max(case.process_groups for case in cases)
    groups = [group, *(dist.new_group(timeout=setup.timeout) for _ in range(count - 1))]
    for together in _batches(cases, setup, world, control):
        yield from _measured([Trial(case, setup, groups, control) for case in together], config, control, advance)  # type: ignore[arg-type]
        release_free_memory()


def _measured(
    trials: Sequence[Trial], config: BenchConfig, control: dist.ProcessGroup, advance: Advance
) -> Iterator[tuple[Case, Measured]]:
    """Settings that are in memory together, of which nothing is left afterwards but cycles of objects."""
    _take_turns(trials, config, control, advance)
    for trial in trials:
        yield trial.case, _unpacked(exchange(_packed(trial.measured()), over(control)))
    for trial in trials:
        trial.close()


def _take_turns(trials: Sequence[Trial], config: BenchConfig, control: dist.ProcessGroup, advance: Advance) -> None:
    """Every turn, each setting once, and each time another one first; all ranks begin together."""
    for turn in range(config.warmup + config.steps):
        if turn == config.warmup:
            for trial in trials:
                trial.end_warmup()
        for place in range(len(trials)):
            dist.barrier(control)
            trials[(turn + place) % len(trials)].turn()
            advance(turn * len(trials) + place)


def _batches(cases: Sequence[Case], setup: Setup, world: World, control: dist.ProcessGroup) -> list[list[Case]]:
    """The settings that fit into memory together, in order. A collective call."""
    with torch.device("meta"):
        size = sum(parameter.nbytes for parameter in setup.task.build().parameters())
    fit = max(1, int(SHARE * _free_memory(world) / (COPIES * max(size, 1))))
    fewest = min(map(int, exchange(str(fit), over(control))))
    return [list(cases[first : first + fewest]) for first in range(0, len(cases), fewest)]


def _free_memory(world: World) -> int:
    """Bytes for this rank: of the GPU, or its share of the host's."""
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info(world.device)[0]
    listing = Path("/proc/meminfo")
    if not listing.exists():
        return 2**62
    fields = dict(line.split(":", 1) for line in listing.read_text().splitlines())
    own_host = list(world.hosts).count(world.hosts[world.rank])
    neighbours = world.size if lab_here() else own_host  # emulated hosts share the memory
    return int(fields["MemAvailable"].split()[0]) * 1024 // neighbours


def _packed(measured: Measured) -> str:
    return json.dumps([measured.seconds, measured.phases, vars(measured.traffic), measured.slice_mb, measured.tuned])


def _unpacked(texts: Sequence[str]) -> Measured:
    """Return the measurements of all ranks; the traffic is the first one's."""
    found = [json.loads(text) for text in texts]
    seconds = list(itertools.chain.from_iterable(each[0] for each in found))
    phases = {name: list(itertools.chain.from_iterable(each[1][name] for each in found)) for name in PHASES}
    return Measured(seconds, phases, Traffic(**found[0][2]), *found[0][3:])
