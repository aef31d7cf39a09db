"""`gradwire replay`: predicted beside measured steps of an emulated accelerator, and the same on paper for more hosts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ...ddp_core.overlap.bounds import optimal, synchronous
from ...ddp_core.overlap.link_cost import LinkCost
from ..network.link import parse_rate
from ..results.files import check_file
from ..workloads.emulation import (
    Trace,
    chosen_trace,
    cost_on,
    predicted,
    step_by_buckets,
    step_by_layers,
    step_by_slices,
)
from ..workloads.order import BACKWARD, Order

MILLI = 1000
PAPER_ORDERS: tuple[Order, ...] = (BACKWARD, "slices", "priority")


@dataclass(frozen=True)
class ReplayConfig:
    """Replay the steps that bench measured on an emulated accelerator, and those of more hosts on paper."""

    files: list[str] = field(default_factory=list)
    """files of gradwire bench --compute emulate:TRACE --json FILE, measured with --link or --netlab.hosts"""
    hosts: list[int] = field(default_factory=lambda: [16, 64, 256, 1024])
    """also predict the steps on these numbers of hosts, with the same bandwidth per host"""
    latency: float = 20e-6
    """latency between two hosts in seconds; a collective pays it 2 log2(hosts) times"""
    picture: str | None = None
    """draw communication and computation of the first row to this PNG file, in backward's order and by priority"""
    json: bool = False
    """print JSON instead of tables"""

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("files is empty: name files of gradwire bench --compute emulate:TRACE --json FILE")
        if too_few := [count for count in self.hosts if count < 1]:
            raise ValueError(f"hosts are at least 1, got {too_few[0]}")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency is at least 0 seconds, got {self.latency}")
        check_file("picture", self.picture)


@dataclass(frozen=True)
class MeasuredRow:
    """A row of bench. `rate`: of each host's link, bytes a second, not dilated; 0 is no limit. Seconds are dilated ones."""

    trace: Trace
    dilate: float
    rate: float
    world_size: int
    compressor: str
    order: Order
    bucket_mb: float | None
    seconds: float
    stretch: float
    optimizer: float

    def predicted(self) -> float:
        """The step by replay, at the nominal rate: computation takes what it took, and the optimizer comes behind it."""
        place = (self.trace, self.compressor, self.world_size, self._cost, self.order)
        return predicted(*place, dilate=self.dilate * self.stretch, bucket_mb=self.bucket_mb) + self.optimizer

    def bound_here(self) -> float:
        """T* of this machine, as in bench."""
        place = (self.trace, self.compressor, self.world_size, self._cost)
        return optimal(step_by_layers(*place, self.dilate * self.stretch)) + self.optimizer

    @property
    def _cost(self) -> LinkCost:
        return LinkCost(0.0, self.dilate / self.rate if self.rate else 0.0)


def replay_command(config: ReplayConfig) -> int:
    """Show both tables; the exit code."""
    rows = [row for file in config.files for row in measured_rows(Path(file).expanduser())]
    if config.picture:
        draw_row(rows[0], Path(config.picture).expanduser())
    compared, paper = [beside(row) for row in rows], list(on_paper(rows, config))
    if config.json:
        print(json.dumps({"measured": compared, "predicted": paper}, indent=2))
        return 0
    console = Console(width=max(Console().width, 120))
    errors = sorted(abs(row["error"]) for row in compared)
    middle = errors[len(errors) // 2]
    console.print(_table("predicted beside measured steps, ms (of an undilated accelerator)", compared))
    console.print(f"error of the prediction: median {middle:.1%}, worst {errors[-1]:.1%}", highlight=False)
    console.print(_table(f"on paper, ms: {config.latency * 1e6:g} us from host to host", paper))
    return 0


def measured_rows(path: Path) -> list[MeasuredRow]:
    """The rows of a file that replay can tell of. Raises ValueError for a file without one."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        config, rows = document["config"], document["rows"]
        trace = chosen_trace(config["compute"])
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no file of gradwire bench --json: {type(error).__name__} {error}") from error
    if trace is None:
        raise ValueError(
            f"{path} was measured without an emulated accelerator: only --compute emulate:TRACE is replayed"
        )
    rate = min(filter(None, map(parse_rate, (config["link"] or "0", config["netlab"]["rate"]))), default=0.0)
    found = [
        MeasuredRow(
            trace,
            config["dilate"],
            rate,
            row["world_size"],
            row["compressor"],
            row["order"],
            row["bucket_mb"] if row["order"] == BACKWARD else row["slice_mb"],
            row["measurements"]["sec_per_iter"]["p50"],
            row["stretch"],
            row["phases"]["optimizer"],
        )
        for row in rows
        if row["ddp"] == "gradwire" and row["sync_every"] == 1 and row["overlap"]
    ]
    if not found:
        raise ValueError(f"{path} has no row of gradwire's DistributedDataParallel that averages in every iteration")
    return found


def beside(row: MeasuredRow) -> dict[str, Any]:
    """A measured step and the prediction, in undilated seconds."""
    expected, cost = row.predicted(), LinkCost(0.0, 1 / row.rate if row.rate else 0.0)
    model = step_by_layers(row.trace, row.compressor, row.world_size, cost)
    return {
        **_place(row, row.world_size),
        "order": row.order,
        "predicted": expected / row.dilate,
        "measured": row.seconds / row.dilate,
        "error": expected / row.seconds - 1,
        "bound": optimal(model),
        "bound_here": row.bound_here() / row.dilate,
        "synchronous_bound": synchronous(model),
    }


def on_paper(rows: Sequence[MeasuredRow], config: ReplayConfig) -> Iterator[dict[str, Any]]:
    """The step of each trace, compressor and link on other numbers of hosts, in each order."""
    different = {(row.trace.name, row.trace.seconds, row.compressor, row.rate): row for row in rows}
    for row in different.values():
        for hosts in config.hosts:
            cost = cost_on(hosts, row.rate, config.latency)
            place = (row.trace, row.compressor, hosts, cost)
            steps: dict[str, float] = {order: predicted(*place, order) for order in PAPER_ORDERS}
            without_latency = step_by_layers(row.trace, row.compressor, hosts, LinkCost(0.0, cost.beta))
            yield {**_place(row, hosts), **steps, "bound": optimal(without_latency)}


def draw_row(row: MeasuredRow, path: Path) -> None:
    """Draw the steps of a row's trace, compressor and link."""
    from .picture import draw  # here, since matplotlib is optional

    cost = LinkCost(0.0, 1 / row.rate if row.rate else 0.0)
    buckets = step_by_buckets(row.trace, row.compressor, row.world_size, cost)
    slices = step_by_slices(row.trace, row.compressor, row.world_size, cost)
    name = f"{row.trace.name}, {row.compressor}, {row.world_size} hosts, {row.rate * 8 / 1e9:g} Gbit/s"
    draw(buckets, slices, name, path)


def _place(row: MeasuredRow, hosts: int) -> dict[str, Any]:
    return {
        "trace": f"{row.trace.name}, {row.trace.seconds:.3g} s",
        "gbit": row.rate * 8 / 1e9,
        "compressor": row.compressor,
        "hosts": hosts,
    }


def _table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name, value in rows[0].items():
        table.add_column(name.replace("_", " "), justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(_text(name, value) for name, value in row.items()))
    return table


def _text(name: str, value: Any) -> str:
    if name == "error":
        return f"{value:+.1%}"
    if name == "gbit":
        return f"{value:g}" if value else "no limit"
    return f"{value * MILLI:.1f}" if isinstance(value, float) else str(value)
