"""`gradwire trace`: show a trace, or make one of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ...results.files import check_file
from ..data import data_shape
from ..models import ModelConfig, build_model
from .recording import from_flops
from .shipped import load_trace
from .trace import BY_OPERATIONS, Trace

MILLI = 1000


@dataclass(frozen=True)
class TraceConfig:
    """Layers of a model and the time of each: of a trace that there is, or of a model at a given speed."""

    trace: str | None = None
    """trace to show: a name such as resnet50, or a file, with @SECONDS to scale it; if not given, the model's"""
    model: ModelConfig = field(default_factory=ModelConfig)
    """model to make a trace of, and its sizes"""
    batch_size: int = 8
    """samples per step"""
    seconds: float | None = None
    """computation of the model per step in seconds, shared out among the layers by their floating-point operations"""
    rows: int = 20
    """number of layers in the table, the slowest ones; the file has all"""
    json: str | None = None
    """write the trace to this file, for --compute emulate:FILE"""

    def __post_init__(self) -> None:
        for name in ("batch_size", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, got {getattr(self, name)}")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds is above 0, got {self.seconds}")
        if self.trace is not None and self.seconds is not None:
            raise ValueError(f"seconds is for a model; for a trace write {self.trace}@{self.seconds:g}")
        if self.trace is None and self.seconds is None:
            raise ValueError(
                "name a trace, such as resnet50, or give the seconds of a model's step: --model gpt --seconds 0.1"
            )
        check_file("json", self.json)


def trace_command(config: TraceConfig) -> int:
    """Show the trace, and write it where that is asked for; the exit code."""
    trace = load_trace(config.trace) if config.trace else traced(config.model, config.batch_size, config.seconds or 0.0)
    console = Console()
    console.print(_table(trace, config.rows))
    total = f"{trace.forward_seconds:.4g} s forward and {trace.backward_seconds:.4g} s backward"
    console.print(
        f"{trace.elements:,} parameters, {total}, {trace.batch_size} samples a step", highlight=False, soft_wrap=True
    )
    console.print(f"source: {trace.source}", highlight=False, markup=False, soft_wrap=True)
    if config.json:
        path = Path(config.json).expanduser()
        trace.write(path)
        console.print(f"trace      {path}", highlight=False, markup=False, soft_wrap=True)
    return 0


def traced(model: ModelConfig, batch_size: int, seconds: float) -> Trace:
    """The trace of a model whose step takes so many seconds, by its operations."""
    name, source = model.name.replace(":", "-"), BY_OPERATIONS.format(seconds=seconds) + "given by the user"
    shape = data_shape("text" if model.kind == "tokens" else "cifar10", model)
    with torch.random.fork_rng(), torch.device("meta"):
        built = build_model(model)
        inputs, _ = shape.example(batch_size)
    return from_flops(built, inputs, name=name, source=source, samples_per_second=batch_size / seconds)


def _table(trace: Trace, rows: int) -> Table:
    """The layers that take longest, in the order of forward."""
    by_time = sorted(trace.layers, key=lambda layer: layer.forward_seconds + layer.backward_seconds, reverse=True)
    shown = {layer.name for layer in by_time[:rows]}
    table = Table(title=f"{trace.name}: {len(shown)} of {len(trace.layers)} layers", title_justify="left")
    table.add_column("layer")
    for heading in ("parameters", "forward", "backward"):
        table.add_column(heading, justify="right", no_wrap=True)
    for layer in trace.layers:
        if layer.name in shown:
            elements = sum(map(prod, layer.parameters.values()))
            seconds = (layer.forward_seconds, layer.backward_seconds)
            table.add_row(layer.name, f"{elements:,}", *(f"{each * MILLI:.3f} ms" for each in seconds))
    return table
