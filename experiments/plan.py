"""`gradwire plan`: what each compressor would send for a model, without training it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from torch import Tensor, nn

from ..compress import compressor
from ..hooks.fsdp.plan import plan_sharded
from ..hooks.local_sgd.arguments import site_compressor
from ..hooks.local_sgd.plan import SitesPlan, Wan, recommended, sites_plan
from ..hooks.plan import Plan, plan, ready_order
from .network.link import parse_rate, shown_rate
from .workloads.data import DATA, data_shape
from .workloads.models import ModelConfig, build_model
from .workloads.sharding import TORCH, check_payloads, parts, payloads
from .workloads.training import loss_of

BUSES = {"pcie3x16": "126gbit", "pcie4x16": "252gbit", "pcie5x16": "504gbit"}  # 16 lanes of 8, 16, 32 GT/s, 128b/130b
OF_DDP, OF_FSDP = ("none", "bf16", "powersgd:rank=4", "topk", "onebit"), ("none", "bf16", "int8/int4", "int4")
FOR_SITES = ["none", "bf16", "int8", "int4", "int2"]
SHOWN = ["compressor", "payload_bytes_per_step", "sent_bytes_per_step", "compression_ratio"]
SHOWN += ["state_bytes", "work_bytes", "bytes_per_parameter"]
MEMORY = ("state", "work", "per parameter")
MATRIX, MOST_PARAMETERS = 4096, 1e13
RUN_AT_MOST = 2**26  # parameters: one backward of a larger model is traced on the meta device, at no cost


@dataclass(frozen=True)
class PlanConfig:
    """Bytes a step and compression ratio of each compressor, from a dry run that needs no memory."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """model to plan for, and its sizes"""
    data: str | None = None
    """data set whose shapes the model is built for: text, packages, digits, patterns, mnist or cifar10; that of
    the model's paper if not given"""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """ddp, or fsdp for torch's FSDP2; with fsdp a compressor is WEIGHTS/GRADIENTS such as int8/int4, or one word for
    both"""
    compressors: list[str] = field(default_factory=lambda: list(OF_DDP))
    """compressors to plan for, separated by commas; with fsdp none,bf16,int8/int4,int4 if not given"""
    workers: int = 8
    """number of ranks"""
    bucket_mb: float | None = None
    """DDP's bucket size in MiB; null gives 1 for the first bucket and 25 for the others"""
    local_every: int = 0
    """average the models every N optimizer steps by local SGD and spread its bytes over them; 0 averages the
    gradients of every step"""
    bus: str | None = None
    """bandwidth of a bus that all ranks of a host share: pcie3x16, pcie4x16, pcie5x16, or a rate such as 100gbit;
    adds the computed time of a step's bytes on it"""
    sites: int = 0
    """number of sites that train by local SGD (LocalSteps); predicts for each compressor how often they can average"""
    up: str = "100mbit"
    """with --sites: bandwidth from a site to the others"""
    down: str | None = None
    """with --sites: bandwidth to a site; that of --up if not given"""
    round_trip_ms: float = 60.0
    """with --sites: milliseconds of a round trip between two sites; with --relay between a site and the relay"""
    relay: bool = False
    """with --sites: payloads go through gradwire rendezvous --relay"""
    step_seconds: float = 1.0
    """with --sites: seconds of a training step"""
    computing: float = 0.95
    """with --sites: share of the time that sites should compute"""
    parameters: float = 0.0
    """number of a model's parameters, such as 72.7e9, in matrices of 4096 x 4096, in place of --model"""
    json: bool = False
    """print JSON instead of a table"""

    def __post_init__(self) -> None:
        if self.data is not None and self.data not in DATA:
            raise ValueError(f"unknown data {self.data!r}; there are: {', '.join(DATA)}")
        if self.workers < 1:
            raise ValueError(f"--workers is at least 1, got {self.workers}")
        if self.bucket_mb is not None and not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb is above 0, got {self.bucket_mb}")
        if self.local_every < 0:
            raise ValueError(f"local_every is at least 1, or 0 for the gradients of every step; got {self.local_every}")
        if self.bus is not None and not parse_rate(BUSES.get(self.bus, self.bus)) > 0:
            raise ValueError(f"bus is {', '.join(BUSES)} or a rate above 0 such as 100gbit, got {self.bus!r}")
        if self.sites == 1 or self.sites < 0 or not self.step_seconds > 0 or not 0 < self.computing < 1:
            raise ValueError(
                "--sites is at least 2, --step-seconds above 0 and --computing between 0 and 1; got "
                f"{self.sites}, {self.step_seconds} and {self.computing}"
            )
        if not self.round_trip_ms >= 0 or not all(parse_rate(rate) > 0 for rate in (self.up, self.down or self.up)):
            raise ValueError("--round-trip-ms is not negative, and --up and --down are rates above 0 such as 100mbit")
        if self.parameters and not 1 <= self.parameters <= MOST_PARAMETERS:
            raise ValueError(f"--parameters is from 1 to {MOST_PARAMETERS:.0e}, got {self.parameters}")
        if self.sites and (self.parallel == "fsdp" or self.local_every or self.bus is not None):
            raise ValueError("--sites plans local SGD between sites: leave out --parallel, --local-every and --bus")
        if not self.compressors:
            raise ValueError("compressors is empty: name at least one, such as none,bf16,int4")
        if self.parallel == "fsdp" and (self.bucket_mb is not None or self.local_every):
            raise ValueError("bucket_mb and local_every are of ddp: leave them out with parallel fsdp")
        for spec in self.specs:
            check_payloads(spec) if self.parallel == "fsdp" else compressor(spec)
        if self.parallel == "fsdp" and TORCH in self.specs:
            raise ValueError(
                "plan computes the bytes of gradwire alone: leave torch out; none sends uncompressed shards"
            )

    @property
    def specs(self) -> Sequence[str]:
        """The compressors to plan for."""
        return OF_FSDP if self.parallel == "fsdp" and tuple(self.compressors) == OF_DDP else self.compressors


def plan_command(config: PlanConfig) -> int:
    """Print the plan; the command's exit code."""
    if config.sites:
        return _plan_sites(config)
    if config.parameters:
        raise ValueError("--parameters goes with --sites: a step's bytes depend on the model, which --model names")
    model, order = _traced(config)
    plans = [_planned(model, order, spec, config) for spec in config.specs]
    elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if config.json:
        rows = [{name: getattr(each, name) for name in SHOWN} | _on_bus(config, each) for each in plans]
        about = {"model": config.model.name, "parameters": elements, "world_size": config.workers}
        print(json.dumps({**about, "rows": rows}, indent=2))
    else:
        Console().print(_table(config, elements, plans))
    return 0


def _traced(config: PlanConfig) -> tuple[nn.Module, list[Tensor]]:
    """The model, and its parameters in the order in which a backward makes their gradients ready, as DDP finds it."""
    data = data_shape(config.data, config.model) if config.data else None
    sample = data_shape(config.data, config.model)
    with torch.device("meta"):
        elements = sum(p.numel() for p in build_model(config.model, data).parameters())
    with torch.random.fork_rng(), torch.device("cpu" if elements <= RUN_AT_MOST else "meta"):
        model = build_model(config.model, data)
        inputs, targets = sample.example(2)
        return model, ready_order(model, lambda: loss_of(model, inputs, targets))


def _plan_sites(config: PlanConfig) -> int:
    """Print how often sites can average their models; the command's exit code."""
    up = parse_rate(config.up)
    down = up if config.down is None else parse_rate(config.down)
    wan = Wan(config.sites, up, down, config.round_trip_ms / 1000, config.relay)
    parameters = _matrices(int(config.parameters)) if config.parameters else _trained(config)
    specs = FOR_SITES if config.compressors == PlanConfig().compressors else config.compressors
    plans = [
        sites_plan(site_compressor(spec), parameters, wan, config.step_seconds, config.computing) for spec in specs
    ]
    best = recommended(plans)
    elements = sum(each.numel() for each in parameters.values())
    rows = [_sites_row(spec, each, elements) for spec, each in zip(specs, plans, strict=True)]
    if config.json:
        print(json.dumps({"sites": config.sites, "rows": rows, "recommended": rows[best]}, indent=2))
        return 0
    name = config.model.name if not config.parameters else "a model"
    title = (
        f"{name}: {elements:,} parameters at {config.sites} sites, {config.step_seconds:g} s per step, {_lines(config)}"
    )
    table = Table(title=title)
    for heading in ("compressor", "every", "fragments", "sent", "received", "round", "computing", *MEMORY):
        table.add_column(heading, justify="left" if heading == "compressor" else "right")
    for row in rows:
        sent, received = (decimal(round(float(row[key]))) for key in ("sent_bytes", "received_bytes"))
        counts = str(row["every"]), str(row["fragments"])
        speed = _seconds(float(row["seconds"])), f"{row['computing']:.1%}"
        memory = _memory(row["state_bytes"], row["work_bytes"], elements)
        table.add_row(str(row["compressor"]), *counts, sent, received, *speed, *memory)
    console = Console()
    console.print(table)
    chosen = rows[best]
    options = ", ".join(f"{key}={chosen[key]!r}" for key in ("every", "fragments", "compressor"))
    console.print(f"gradwire.LocalSteps(model, optimizer, {options})", soft_wrap=True)
    if plans[best].computing < config.computing:
        console.print(
            f"With no compressor here sites compute for {config.computing:.0%} of the time: name stronger ones."
        )
    return 0


def _sites_row(spec: str, each: SitesPlan, elements: int) -> dict[str, Any]:
    """The means over the fragments' rounds, and the memory of a site."""
    count = len(each.rounds)
    return {
        "compressor": spec,
        "every": each.every,
        "fragments": count,
        "sent_bytes": sum(part.up for part in each.rounds) / count,
        "received_bytes": sum(part.down for part in each.rounds) / count,
        "seconds": sum(part.seconds for part in each.rounds) / count,
        "computing": each.computing,
        "state_bytes": each.state_bytes,
        "work_bytes": each.work_bytes,
        "bytes_per_parameter": (each.state_bytes + each.work_bytes) / elements,
    }


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _lines(config: PlanConfig) -> str:
    rates = f"{shown_rate(config.up)} up, {shown_rate(config.down or config.up)} down"
    return f"{rates}, {config.round_trip_ms:g} ms{' through a relay' if config.relay else ''}"


def _matrices(elements: int) -> dict[str, Tensor]:
    """Matrices of so many elements together; the last one is smaller."""
    whole, rest = divmod(elements, MATRIX**2)
    shapes = [(MATRIX, MATRIX)] * whole + [(rest,)] * (rest > 0)
    return {str(index): torch.empty(shape, device="meta") for index, shape in enumerate(shapes)}


def _trained(config: PlanConfig) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = build_model(config.model, data_shape(config.data, config.model) if config.data else None)
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def _planned(model: nn.Module, order: Sequence[Tensor], spec: str, config: PlanConfig) -> Plan:
    if config.parallel == "fsdp":
        return replace(plan_sharded(parts(model), *payloads(spec), world_size=config.workers), compressor=spec)
    whole = plan(model, spec, world_size=config.workers, bucket_mb=config.bucket_mb, order=order)
    return _spread(whole, config)


def _spread(whole: Plan, config: PlanConfig) -> Plan:
    """A step's part of what is averaged once in `local_every` steps."""
    steps = config.local_every or 1
    return replace(
        whole,
        payload_bytes_per_step=round(whole.payload_bytes_per_step / steps),
        sent_bytes_per_step=whole.sent_bytes_per_step / steps,
        compression_ratio=whole.compression_ratio * steps,
    )


def _memory(state: int, work: int, parameters: int) -> tuple[str, str, str]:
    return decimal(state), decimal(work), f"{(state + work) / parameters:.2f} bytes"


def _on_bus(config: PlanConfig, each: Plan) -> dict[str, float]:
    """The seconds of a step's bytes of all ranks on the bus that they share, if there is one."""
    if config.bus is None:
        return {}
    return {"bus_seconds": config.workers * each.sent_bytes_per_step / parse_rate(BUSES.get(config.bus, config.bus))}


def _table(config: PlanConfig, elements: int, plans: list[Plan]) -> Table:
    local = f" of {config.local_every} local ones" if config.local_every else ""
    table = Table(title=f"{config.model.name}: {elements:,} parameters on {config.workers} ranks, a step{local}")
    table.add_column("compressor")
    memory = () if config.local_every else MEMORY  # local SGD has state of its own
    on_bus = () if config.bus is None else ("on the bus",)
    for heading in ("payload of a rank", "sent by a rank", "ratio", *on_bus, *memory):
        table.add_column(heading, justify="right")
    for each in plans:
        payload, sent = decimal(each.payload_bytes_per_step), decimal(round(each.sent_bytes_per_step))
        kept = () if config.local_every else _memory(each.state_bytes, each.work_bytes, each.parameters)
        seconds = [f"{1000 * value:.4g} ms" for value in _on_bus(config, each).values()]
        table.add_row(each.compressor, payload, sent, f"{each.compression_ratio:.2f}", *seconds, *kept)
    return table
