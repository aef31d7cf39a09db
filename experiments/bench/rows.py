"""Settings and rows of the benchmark, and lower bounds of a step's time."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...ddp_core.measure.link_schedule import optimal, synchronous
from ...ddp_core.measure.step_model import LinkCost, StepModel
from ..network.link import parse_rate
from ..results.statistics import percentiles
from ..workloads.emulation import EmulationConfig, step_by_layers
from ..workloads.order import BACKWARD, Order

KIND = "bench"
PHASES = ("forward", "backward", "exposed", "optimizer")


@dataclass(frozen=True)
class Case:
    """A setting of the benchmark. `bucket_mb`: None is 1 MiB for the first bucket and 25 for the others; in another `order`
    than backward's it is the payload of a slice, and None is what gradwire.overlap takes.
    """

    ddp: Literal["torch", "gradwire", "none"]
    compressor: str = "none"
    bucket_mb: float | None = None
    process_groups: int = 1
    sync_every: int = 1
    overlap: bool = True
    order: Order = BACKWARD


NO_DDP = Case("none")
FACTORS = tuple(field.name for field in dataclasses.fields(Case))


@dataclass(frozen=True)
class Traffic:
    """Bytes of one rank in a synchronized iteration; `ratio`: those of an uncompressed float32 all-reduce over them."""

    payload_bytes: int = 0
    sent_bytes: float = 0.0
    ratio: float = 1.0


@dataclass(frozen=True)
class Placement:
    """Ranks 0 to `world_size` - 1, and the hosts that they are on."""

    world_size: int
    machines: int


@dataclass(frozen=True)
class Measured:
    """The ranks' measurements of one setting: seconds of an iteration, turn by turn and rank by rank, and its phases.

    `slice_mb`: MiB of payload of a slice; None where buckets are sent. `tuned`: the compressor with the options that
    `attach` adds for the optimizer; None if it adds none.
    """

    seconds: Sequence[float]
    phases: Mapping[str, Sequence[float]]
    traffic: Traffic
    slice_mb: float | None = None
    tuned: str | None = None


def row(
    model: str, batch_size: int, case: Case, placement: Placement, measured: Measured, config: EmulationConfig
) -> dict[str, Any]:
    """A row of the file. ex_per_sec is a rank's own samples over the seconds of that percentile, as in PyTorch's.

    stretch: how many times the emulated accelerator's seconds forward and backward took; None on a real one.
    """
    seconds = percentiles(measured.seconds)
    phases = {name: statistics.median(measured.phases[name]) for name in PHASES}
    emulated = config.trace and config.trace.seconds * config.dilate
    stretch = (phases["forward"] + phases["backward"]) / emulated if emulated else None
    return {
        "model": model,
        "batch_size": batch_size,
        "world_size": placement.world_size,
        "machines": placement.machines,
        "ranks_per_machine": placement.world_size // placement.machines,
        **dataclasses.asdict(case),
        "tuned": measured.tuned,
        "slice_mb": measured.slice_mb,
        "measurements": {
            "sec_per_iter": seconds,
            "ex_per_sec": {name: batch_size / value for name, value in seconds.items()},
        },
        "phases": phases,
        "stretch": stretch,
        "payload_bytes_per_step": measured.traffic.payload_bytes,
        "sent_bytes_per_step": measured.traffic.sent_bytes,
        "compression_ratio": measured.traffic.ratio,
        "seconds": list(measured.seconds),
        "labels": config.labels(),
        **bounds(config, case, placement.world_size),
        "bound_here_seconds": bound_here(config, case, placement.world_size, stretch, phases["optimizer"]),
    }


def bounds(config: EmulationConfig, case: Case, world_size: int) -> dict[str, float | None]:
    """T*, the least seconds of an iteration in any order of sending, and the least if forward waits for all of it.

    They count computation and what the link has to carry. Known of an emulated accelerator alone (None otherwise), and of
    iterations that all average gradients.
    """
    step = _step(config, case, world_size)
    best, waiting = (None, None) if step is None else (optimal(step), synchronous(step))
    return {"bound_seconds": best, "synchronous_bound_seconds": waiting}


def bound_here(
    config: EmulationConfig, case: Case, world_size: int, stretch: float | None, optimizer: float
) -> float | None:
    """Return T* of this host: forward and backward take `stretch` times the trace, the optimizer `optimizer` seconds."""
    step = _step(config, case, world_size, stretch or 1.0)
    return None if step is None else optimal(step) + optimizer


def _step(config: EmulationConfig, case: Case, world_size: int, stretch: float = 1.0) -> StepModel | None:
    """The model of a step over the slower of the emulated networks, at its nominal rate, without delay, jitter and loss."""
    trace = config.trace
    if trace is None or case.ddp == NO_DDP.ddp or case.sync_every > 1:
        return None
    rates = (parse_rate(config.slowed_link or "0"), config.slowed_netlab.slower)
    slowest = min(filter(None, rates), default=0.0)
    cost = LinkCost(0.0, 1 / slowest if slowest else 0.0)
    return step_by_layers(trace, case.compressor, world_size, cost, config.dilate * stretch)
