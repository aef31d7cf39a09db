"""What was measured: settings and rows."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..results.statistics import percentiles
from ..workloads.emulation import EmulationConfig
from ..workloads.order import BACKWARD, Order

KIND = "bench"
PHASES = ("forward", "backward", "exposed", "optimizer")


@dataclass(frozen=True)
class Case:
    """A setting of the benchmark. `bucket_mb`: None is 1 MiB for the first bucket and 25 for the others; in another `order`
    than backward's it is the size of slices on the wire, and None is what gradwire.overlap takes.
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
    """Bytes of one rank in a synchronized iteration; `ratio` is what a dense float32 ring all-reduce sends over them."""

    payload_bytes: int = 0
    sent_bytes: float = 0.0
    ratio: float = 1.0


@dataclass(frozen=True)
class Placement:
    """Ranks 0 to `world_size` - 1, and the machines that they are on."""

    world_size: int
    machines: int

    @property
    def ranks_per_machine(self) -> int:
        """Ranks on each of the machines."""
        return self.world_size // self.machines

    def __str__(self) -> str:
        """As PyTorch's benchmark has it: 2M/8G is two machines with eight ranks each."""
        return f"{self.machines}M/{self.ranks_per_machine}G"


@dataclass(frozen=True)
class Measured:
    """What the ranks measured of one setting: seconds of an iteration, turn by turn and rank by rank, and its phases.

    `slice_mb`: MiB on the wire of what was sent at once; None where that is buckets.
    """

    seconds: Sequence[float]
    phases: Mapping[str, Sequence[float]]
    traffic: Traffic
    slice_mb: float | None = None


def row(
    model: str, batch_size: int, case: Case, placement: Placement, measured: Measured, config: EmulationConfig
) -> dict[str, Any]:
    """A row of the file. ex_per_sec is a rank's own samples over the seconds of that percentile, as in PyTorch's.

    stretch: how many times the emulated accelerator's seconds forward and backward took; None on a real one.
    """
    seconds = percentiles(measured.seconds)
    phases = {name: statistics.median(measured.phases[name]) for name in PHASES}
    emulated = config.trace and config.trace.seconds * config.dilate
    return {
        "model": model,
        "batch_size": batch_size,
        "world_size": placement.world_size,
        "machines": placement.machines,
        "ranks_per_machine": placement.ranks_per_machine,
        **dataclasses.asdict(case),
        "slice_mb": measured.slice_mb,
        "measurements": {
            "sec_per_iter": seconds,
            "ex_per_sec": {name: batch_size / value for name, value in seconds.items()},
        },
        "phases": phases,
        "stretch": (phases["forward"] + phases["backward"]) / emulated if emulated else None,
        "payload_bytes_per_step": measured.traffic.payload_bytes,
        "sent_bytes_per_step": measured.traffic.sent_bytes,
        "compression_ratio": measured.traffic.ratio,
        "seconds": list(measured.seconds),
        "labels": config.labels(),
    }
