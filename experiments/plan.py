"""`gradwire plan`: what each compressor would send for a model, without training it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from torch import Tensor, nn

from ..compress import compressor
from ..hooks.fsdp.plan import plan_sharded
from ..hooks.plan import Plan, plan, ready_order
from .network.link import parse_rate
from .workloads.data import data_names, data_shape
from .workloads.models import ModelConfig, build_model
from .workloads.sharding import TORCH, check_payloads, parts, payloads
from .workloads.training import loss_of

BUSES = {"pcie3x16": "126gbit", "pcie4x16": "252gbit", "pcie5x16": "504gbit"}  # 16 lanes of 8, 16, 32 GT/s, 128b/130b
OF_DDP, OF_FSDP = ("none", "bf16", "powersgd:rank=4", "topk", "onebit"), ("none", "bf16", "int8/int4", "int4")
NOT_OF_SHARDS = ("work_bytes", "bytes_per_parameter")  # nobody has computed the work memory of FSDP2
RUN_AT_MOST = 2**26  # parameters: one backward of a larger model is traced on the meta device, at no cost


@dataclass(frozen=True)
class PlanConfig:
    """Bytes a step and compression ratio of each compressor, from a dry run that needs no memory."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """model to plan for, and its sizes"""
    data: str | None = None
    """data set whose shapes the model is built for: text, digits, patterns, mnist or cifar10; that of the model's
    paper if not given"""
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
    json: bool = False
    """print JSON instead of a table"""

    def __post_init__(self) -> None:
        if self.data is not None and self.data not in data_names():
            raise ValueError(f"unknown data {self.data!r}; there are: {', '.join(data_names())}")
        if self.workers < 1:
            raise ValueError(f"--workers is at least 1, got {self.workers}")
        if self.bucket_mb is not None and not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb is above 0, got {self.bucket_mb}")
        if self.local_every < 0:
            raise ValueError(f"local_every is at least 1, or 0 for the gradients of every step; got {self.local_every}")
        if self.bus is not None and not parse_rate(BUSES.get(self.bus, self.bus)) > 0:
            raise ValueError(f"bus is {', '.join(BUSES)} or a rate above 0 such as 100gbit, got {self.bus!r}")
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
    model, order = _traced(config)
    plans = [_planned(model, order, spec, config) for spec in config.specs]
    elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if config.json:
        rows = [_row(config, each) | _on_bus(config, each) for each in plans]
        document = {
            "model": config.model.name,
            "parameters": elements,
            "world_size": config.workers,
            "rows": rows,
        }
        print(json.dumps(document, indent=2))
    else:
        Console().print(_table(config, elements, plans))
    return 0


def _traced(config: PlanConfig) -> tuple[nn.Module, list[Tensor]]:
    """The model, and its parameters in the order in which a backward makes their gradients ready, as DDP finds it."""
    data = data_shape(config.data, config.model) if config.data else None
    sample = data or data_shape("text" if config.model.kind == "tokens" else "cifar10", config.model)
    with torch.device("meta"):
        elements = sum(p.numel() for p in build_model(config.model, data).parameters())
    with torch.random.fork_rng(), torch.device("cpu" if elements <= RUN_AT_MOST else "meta"):
        model = build_model(config.model, data)
        inputs, targets = sample.example(2)
        return model, ready_order(model, lambda: loss_of(model, inputs, targets))


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


def _row(config: PlanConfig, each: Plan) -> dict[str, object]:
    row = {
        "compressor": each.compressor,
        "payload_bytes_per_step": each.payload_bytes_per_step,
        "sent_bytes_per_step": each.sent_bytes_per_step,
        "compression_ratio": each.compression_ratio,
        "state_bytes": each.state_bytes,
        "work_bytes": each.work_bytes,
        "bytes_per_parameter": each.bytes_per_parameter,
    }
    return {key: value for key, value in row.items() if config.parallel == "ddp" or key not in NOT_OF_SHARDS}


def _on_bus(config: PlanConfig, each: Plan) -> dict[str, float]:
    """The seconds of a step's bytes of all ranks on the bus that they share, if there is one."""
    if config.bus is None:
        return {}
    return {"bus_seconds": config.workers * each.sent_bytes_per_step / parse_rate(BUSES.get(config.bus, config.bus))}


def _table(config: PlanConfig, elements: int, plans: list[Plan]) -> Table:
    local = f" of {config.local_every} local ones" if config.local_every else ""
    table = Table(title=f"{config.model.name}: {elements:,} parameters on {config.workers} ranks, a step{local}")
    table.add_column("compressor")
    memory: tuple[str, ...] = (
        () if config.local_every else ("state", "work", "per parameter")
    )  # local SGD has state of its own
    memory = memory[:1] if config.parallel == "fsdp" else memory
    on_bus = () if config.bus is None else ("on the bus",)
    for heading in ("payload of a rank", "sent by a rank", "ratio", *on_bus, *memory):
        table.add_column(heading, justify="right")
    for each in plans:
        payload, sent = decimal(each.payload_bytes_per_step), decimal(round(each.sent_bytes_per_step))
        kept = (
            [decimal(each.state_bytes), decimal(each.work_bytes), f"{each.bytes_per_parameter:.2f} bytes"]
            if memory
            else []
        )[: len(memory)]
        seconds = [f"{1000 * value:.4g} ms" for value in _on_bus(config, each).values()]
        table.add_row(each.compressor, payload, sent, f"{each.compression_ratio:.2f}", *seconds, *kept)
    return table
