"""`gradwire plan --sites`: how often sites on the internet can average their models, at which loss, and lines to paste."""

from __future__ import annotations

import json
from typing import Any

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from torch import Tensor

from ..hooks.local_sgd.arguments import site_compressor
from .ddp_step import layered
from .network.link import parse_rate, shown_rate
from .plan_config import PlanConfig, counted
from .sites_plan import SitesPlan, Wan, recommended, sites_plan
from .workloads.data import data_shape
from .workloads.models import build_model

MEMORY = ("state", "work", "per parameter")
FOR_SITES = ["none", "bf16", "int8", "int4", "int2", "onebit"]
AT_ONE_SIZE = 2  # of these, the last ones, have losses between sites of 0.14 M parameters alone: they are shown

LOSS = (
    "Local SGD costs loss: 0.9 M parameters ended 5.2 % above averages at every step (AdamW, every=32, as many steps). With "
    "AdamW and these options nothing larger was measured: compare with int4 at every step on your own model."
)


def plan_for_sites(config: PlanConfig) -> int:
    """Print how often sites can average their models; the command's exit code."""
    up = parse_rate(config.up)
    down = up if config.down is None else parse_rate(config.down)
    wan = Wan(config.sites, up, down, config.round_trip_ms / 1000, config.relay)
    parameters = layered(counted(config.parameters)) if config.parameters else _trained(config)
    seconds = config.step_seconds or 1.0
    named = config.compressors != PlanConfig().compressors
    specs = config.compressors if named else FOR_SITES
    plans = [sites_plan(site_compressor(spec), parameters, wan, seconds, config.computing) for spec in specs]
    best = recommended(plans if named else plans[:-AT_ONE_SIZE])
    elements = sum(each.numel() for each in parameters.values())
    rows = [_sites_row(spec, each, elements) for spec, each in zip(specs, plans, strict=True)]
    if config.json:
        print(json.dumps({"sites": config.sites, "rows": rows, "recommended": rows[best]}, indent=2))
        return 0
    title = (
        f"{config.subject}: {elements:,} parameters at {config.sites} sites, {seconds:g} s per step, {_lines(config)}"
    )
    table = Table(title=title)
    received = ["received"] if config.relay else []  # without a relay a site receives what it sends
    for heading in ("compressor", "every", "fragments", "sent", *received, "round", "computing", "memory"):
        table.add_column(heading, justify="left" if heading == "compressor" else "right")
    for row in rows:
        traffic = [decimal(round(float(row[f"{each}_bytes"]))) for each in ("sent", *received)]
        counts = str(row["every"]), str(row["fragments"])
        speed = _seconds(float(row["seconds"])), f"{row['computing']:.1%}"
        memory = decimal(int(row["state_bytes"]) + int(row["work_bytes"]))
        table.add_row(str(row["compressor"]), *counts, *traffic, *speed, memory)
    console = Console()
    console.print(table)
    chosen = rows[best]
    options = ", ".join(f"{key}={chosen[key]!r}" for key in ("every", "fragments", "compressor"))
    console.print(
        f'at = gradwire.Rendezvous("HOST:29400", sites={config.sites}, secret=pathlib.Path("sites.pem"))',
        soft_wrap=True,
    )
    console.print(f"local = gradwire.LocalSteps(model, optimizer, {options}, at=at)", soft_wrap=True)
    console.print(LOSS, soft_wrap=True)
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


def memory_cells(state: int, work: int, parameters: int) -> tuple[str, str, str]:
    """Return the cells of `MEMORY`."""
    return decimal(state), decimal(work), f"{(state + work) / parameters:.2f} bytes"
