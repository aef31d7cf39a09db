"""`gradwire plan`: what each compressor would send for a model, without training it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from torch import Tensor, nn

from ..compress import compressor
from ..compress.state.shares import ranks_given
from ..hooks.advice.local_sgd import SitesPlan, Wan, recommended, sites_plan
from ..hooks.advice.predict import Prediction
from ..hooks.local_sgd.arguments import site_compressor
from ..hooks.plan import Plan, plan, plan_sharded
from .assumed_parts import Cluster, GpuStep, layered, model_step, predicted_step
from .network.link import parse_rate, shown_rate
from .workloads.data import DATA, data_shape
from .workloads.models import ModelConfig, build_model
from .workloads.sharding import TORCH, check_payloads, parts, payloads
from .workloads.training import loss_of

BUSES = {"pcie3x16": "126gbit", "pcie4x16": "252gbit", "pcie5x16": "504gbit"}  # 16 lanes of 8, 16, 32 GT/s, 128b/130b
OF_DDP, OF_FSDP = ("none", "bf16", "int8", "int4", "powersgd:rank=4"), ("none", "bf16", "int8/int4", "int4")
OF_HOSTS = ("hosts+int8", "hosts+int4")  # where ranks share a host's network card
FOR_SITES = ["none", "bf16", "int8", "int4", "int2"]
SHOWN = ["compressor", "payload_bytes_per_step", "sent_bytes_per_step", "compression_ratio"]
SHOWN += ["state_bytes", "work_bytes", "bytes_per_parameter"]
MEMORY = ("state", "work", "per parameter")
MOST_PARAMETERS = 10**13
COUNT = re.compile(r"(\d+\.?\d*(?:e\d+)?)([kmbt]?)", re.IGNORECASE)
THOUSANDS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SOON = 1e-9  # seconds of a computation that hides nothing
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
    """number of ranks; each is a host of its own, but with --bus, where all are in one box"""
    hosts: int = 0
    """number of hosts, in place of --workers"""
    gpus_per_host: int = 1
    """with --hosts: GPUs of a host, whose ranks share its network card"""
    rate: str | None = None
    """bandwidth of a host's network card, such as 10gbit; adds the most that each compressor can save"""
    micro_batches: int = 1
    """with --step-seconds: micro-batches that a step accumulates; the last one alone hides communication"""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """dtype of the gradients: 16 bits halve the bytes of none"""
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
    step_seconds: float | None = None
    """seconds that a step computes, with all its micro-batches; with --rate or --bus adds the step of each compressor;
    with --sites 1 if not given"""
    computing: float = 0.95
    """with --sites: share of the time that sites should compute"""
    parameters: str | None = None
    """number of a model's parameters, such as 124M or 72.7e9, in the layers of a transformer, in place of --model"""
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
        if self.sites == 1 or self.sites < 0 or not 0 < self.computing < 1:
            raise ValueError(
                f"--sites is at least 2 and --computing between 0 and 1; got {self.sites} and {self.computing}"
            )
        if self.step_seconds is not None and not self.step_seconds > 0:
            raise ValueError(f"--step-seconds is above 0, got {self.step_seconds}")
        if not self.round_trip_ms >= 0 or not all(parse_rate(rate) > 0 for rate in (self.up, self.down or self.up)):
            raise ValueError("--round-trip-ms is not negative, and --up and --down are rates above 0 such as 100mbit")
        if self.parameters is not None and not 1 <= counted(self.parameters) <= MOST_PARAMETERS:
            raise ValueError(f"--parameters is from 1 to {MOST_PARAMETERS:.0e}, got {self.parameters}")
        if self.parameters is not None and self.model != ModelConfig():
            raise ValueError(
                f"--parameters is in place of --model: leave one out, got {self.parameters} and {self.model.name}"
            )
        if self.sites and (self.parallel == "fsdp" or self.local_every or self.timed):
            raise ValueError(
                "--sites plans local SGD between sites: leave out --parallel, --local-every, --rate, --bus"
            )
        self._check_cluster()
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

    def _check_cluster(self) -> None:
        if self.hosts < 0 or self.gpus_per_host < 1 or self.micro_batches < 1:
            raise ValueError(
                "--hosts is 0 or more, and --gpus-per-host and --micro-batches are at least 1; got "
                f"{self.hosts}, {self.gpus_per_host} and {self.micro_batches}"
            )
        if self.rate is not None and not parse_rate(self.rate) > 0:
            raise ValueError(f"--rate is a bandwidth above 0 such as 10gbit, got {self.rate!r}")
        if self.gpus_per_host > 1 and not self.hosts:
            raise ValueError(f"--gpus-per-host={self.gpus_per_host} goes with --hosts: name how many hosts there are")
        if self.parallel == "fsdp" and (self.hosts or self.rate is not None or self.dtype != "fp32"):
            raise ValueError("--hosts, --rate and --dtype are of ddp: leave them out with --parallel fsdp")
        if self.local_every and (self.rate is not None or self.step_seconds is not None):
            raise ValueError("--local-every averages models now and then: leave out --rate and --step-seconds")

    @property
    def specs(self) -> Sequence[str]:
        """The compressors to plan for."""
        if tuple(self.compressors) != OF_DDP:
            return self.compressors
        return OF_FSDP if self.parallel == "fsdp" else OF_DDP + OF_HOSTS * (self.gpus_per_host > 1 and self.hosts > 1)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.hosts * self.gpus_per_host or self.workers

    @property
    def timed(self) -> bool:
        """True if the time of a step's bytes is asked for."""
        return self.rate is not None or self.bus is not None

    @property
    def cluster(self) -> Cluster:
        """The hosts and what their ranks share."""
        box = self.bus is not None and not self.hosts
        hosts, gpus = (1, self.workers) if box else (self.hosts or self.workers, self.gpus_per_host)
        card = float("inf") if self.rate is None else parse_rate(self.rate)
        bus = float("inf") if self.bus is None else parse_rate(BUSES.get(self.bus, self.bus)) / gpus
        return Cluster(hosts, gpus, card, bus)


def counted(text: str) -> int:
    """Return a number of parameters.

    >>> counted("124M"), counted("1.2B"), counted("72.7e9"), counted("1000")
    (124000000, 1200000000, 72700000000, 1000)
    """
    match = COUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"--parameters is a number such as 124M, 1.2B or 72.7e9, got {text!r}")
    return round(float(match[1]) * THOUSANDS[match[2].lower()])


def plan_command(config: PlanConfig) -> int:
    """Print the plan; the command's exit code."""
    if config.sites:
        return _plan_sites(config)
    model, order = _traced(config)
    plans = [_planned(model, order, spec, config) for spec in config.specs]
    steps = _steps(model, order, config) if config.timed else []
    elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if config.json:
        rows = [{name: getattr(each, name) for name in SHOWN} for each in plans]
        for row, times in zip(rows, _times(steps, config), strict=False):
            row.update(times)
        about = {"model": _name(config), "parameters": elements, "world_size": config.ranks}
        print(json.dumps({**about, "rows": rows}, indent=2))
        return 0
    console = Console()
    console.print(_table(config, elements, plans, steps))
    if steps:
        console.print(NOTE, soft_wrap=True)
    return 0


NOTE = """network: the least time that a step's bytes take. saves at most: against the bytes of DDP without gradwire, if \
computation hides nothing.
step, speed-up: with encoding, if two thirds of a micro-batch's computation are backward, which hides communication. \
Latency is left out."""


def _name(config: PlanConfig) -> str:
    return config.model.name if config.parameters is None else f"a transformer of {config.parameters}"


def _steps(model: nn.Module, order: Sequence[Tensor], config: PlanConfig) -> list[Prediction]:
    """The steps without gradwire and with each compressor."""
    computation = (config.step_seconds or SOON) / config.micro_batches
    step = GpuStep(*model_step(model, order), computation, micro_batches=config.micro_batches)
    return [predicted_step(step, config.cluster, spec, config.bucket_mb) for spec in ("none", *config.specs)]


def _times(steps: Sequence[Prediction], config: PlanConfig) -> Iterator[dict[str, float]]:
    """Yield the times of each compressor, in seconds. The first of the steps is that without gradwire."""
    for each in steps[1:]:
        network = each.network / (config.local_every or 1)
        row = {"network_seconds": network, "saves_at_most_seconds": max(0.0, steps[0].network - network)}
        if config.step_seconds is not None:
            row |= {"step_seconds": each.step, "speed_up": steps[0].step / each.step}
        yield row


def _traced(config: PlanConfig) -> tuple[nn.Module, list[Tensor]]:
    """The model, and its parameters in the order in which a backward makes their gradients ready, as DDP finds it."""
    if config.parameters is not None:
        model = _transformer(counted(config.parameters)).to(DTYPES[config.dtype])
        return model, list(model.parameters())
    data = data_shape(config.data, config.model) if config.data else None
    sample = data_shape(config.data, config.model)
    with torch.device("meta"):
        elements = sum(p.numel() for p in build_model(config.model, data).parameters())
    with torch.random.fork_rng(), torch.device("cpu" if elements <= RUN_AT_MOST else "meta"):
        model = build_model(config.model, data)
        inputs, targets = sample.example(2)
        order = ready_order(model, lambda: loss_of(model, inputs, targets))
    return model.to(DTYPES[config.dtype]), order


def _transformer(parameters: int) -> nn.Module:
    """The parameters of a transformer, as backward makes them ready."""
    model = nn.Module()
    for name, each in layered(parameters).items():
        model.register_parameter(name.replace(".", "_"), nn.Parameter(each))
    return model


def _plan_sites(config: PlanConfig) -> int:
    """Print how often sites can average their models; the command's exit code."""
    up = parse_rate(config.up)
    down = up if config.down is None else parse_rate(config.down)
    wan = Wan(config.sites, up, down, config.round_trip_ms / 1000, config.relay)
    parameters = layered(counted(config.parameters)) if config.parameters else _trained(config)
    seconds = config.step_seconds or 1.0
    specs = FOR_SITES if config.compressors == PlanConfig().compressors else config.compressors
    plans = [sites_plan(site_compressor(spec), parameters, wan, seconds, config.computing) for spec in specs]
    best = recommended(plans)
    elements = sum(each.numel() for each in parameters.values())
    rows = [_sites_row(spec, each, elements) for spec, each in zip(specs, plans, strict=True)]
    if config.json:
        print(json.dumps({"sites": config.sites, "rows": rows, "recommended": rows[best]}, indent=2))
        return 0
    title = (
        f"{_name(config)}: {elements:,} parameters at {config.sites} sites, {seconds:g} s per step, {_lines(config)}"
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


def _trained(config: PlanConfig) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = build_model(config.model, data_shape(config.data, config.model) if config.data else None)
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def _planned(model: nn.Module, order: Sequence[Tensor], spec: str, config: PlanConfig) -> Plan:
    if config.parallel == "fsdp":
        return replace(plan_sharded(parts(model), *payloads(spec), world_size=config.ranks), compressor=spec)
    per_host = config.gpus_per_host if ranks_given(compressor(spec)) is not None else 1
    whole = plan(model, spec, world_size=config.ranks, bucket_mb=config.bucket_mb, order=order, ranks_per_host=per_host)
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


def _table(config: PlanConfig, elements: int, plans: list[Plan], steps: Sequence[Prediction]) -> Table:
    local = f" of {config.local_every} local ones" if config.local_every else ""
    table = Table(title=f"{_name(config)}: {elements:,} parameters on {config.ranks} ranks, a step{local}")
    table.add_column("compressor", no_wrap=True, min_width=max(map(len, config.specs)))
    memory = () if config.local_every or steps else MEMORY  # local SGD has state of its own
    times = [_shown_times(each) for each in _times(steps, config)] or [{}] * len(plans)
    for heading in ("payload of a rank", "sent by a rank", "ratio", *times[0], *memory):
        table.add_column(heading, justify="right")
    for each, shown in zip(plans, times, strict=True):
        payload, sent = decimal(each.payload_bytes_per_step), decimal(round(each.sent_bytes_per_step))
        kept = () if not memory else _memory(each.state_bytes, each.work_bytes, each.parameters)
        table.add_row(each.compressor, payload, sent, f"{each.compression_ratio:.2f}", *shown.values(), *kept)
    return table


def _shown_times(row: Mapping[str, float]) -> dict[str, str]:
    return {
        name.removesuffix("_seconds").replace("_", " "): f"{value:.2f}x"
        if name == "speed_up"
        else f"{1e3 * value:.4g} ms"
        for name, value in row.items()
    }


def ready_order(model: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor]:
    """The parameters in the order in which one backward of `loss()` makes their gradients ready; unused ones last."""
    ready: list[Tensor] = []
    parameters = [p for p in model.parameters() if p.requires_grad]
    handles = [p.register_post_accumulate_grad_hook(ready.append) for p in parameters]
    try:
        loss().backward()
    finally:
        for handle in handles:
            handle.remove()
        for parameter in parameters:
            parameter.grad = None
    seen = set(map(id, ready))
    return ready + [p for p in reversed(parameters) if id(p) not in seen]
