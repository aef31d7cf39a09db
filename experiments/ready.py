"""`gradwire ready`: when each gradient of a backward pass is ready (figure 2 of Li et al. 2020)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from .results.files import check_file, figures_document, write_json
from .workloads.data import data_shape
from .workloads.models import ModelConfig, build_model
from .workloads.training import loss_of

SHOWN = 12  # gradients in the table; the file has them all


@dataclass(frozen=True)
class ReadyConfig:
    """Time from the beginning of backward until each parameter's gradient is there, in the order they get ready."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig("torchvision:resnet50"))
    """model to time, and its sizes"""
    batch_size: int = 8
    """samples per step"""
    steps: int = 5
    """number of measured steps; one more comes before them"""
    threads: int = 0
    """torch threads; 0 keeps torch's own number"""
    json: str | None = None
    """write all figures to this file"""

    def __post_init__(self) -> None:
        self.model.refuse_own("ready")
        for name in ("batch_size", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, got {getattr(self, name)}")
        check_file("json", self.json)


def ready(config: ReadyConfig) -> int:
    """Measure, show and write; the command's exit code."""
    if config.threads:
        torch.set_num_threads(config.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, loss = _prepared(config, device)
    steps = [ready_times(model, loss) for _ in range(config.steps + 1)][1:]
    rows = _rows(config, model, steps)
    Console().print(_table(config, rows))
    if config.json:
        write_json(figures_document("ready", config, rows), config.json)
    return 0


def _prepared(config: ReadyConfig, device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The model with random weights, and its loss on a random batch."""
    shape = data_shape(None, config.model)
    with torch.random.fork_rng():
        model = build_model(config.model, shape).to(device)
        inputs, targets = (tensor.to(device) for tensor in shape.example(config.batch_size))
    return model, lambda: loss_of(model, inputs, targets)


def ready_times(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, float]:
    """Seconds from the beginning of backward until each parameter's gradient was accumulated, in that order.

    On a GPU these are the times at which the kernels have run: the host waits for each.
    """
    times: dict[str, float] = {}

    def marker(name: str) -> Callable[[Tensor], None]:
        def mark(parameter: Tensor) -> None:
            if parameter.is_cuda:
                torch.cuda.synchronize(parameter.device)
            times[name] = time.perf_counter() - began

        return mark

    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    handles = [each.register_post_accumulate_grad_hook(marker(name)) for name, each in trained.items()]
    value = loss()
    began = time.perf_counter()
    value.backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return times


def _rows(config: ReadyConfig, model: nn.Module, steps: list[dict[str, float]]) -> list[dict[str, Any]]:
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    order = list(steps[-1])
    columns = {name: [step[name] for step in steps] for name in order}
    return [
        {
            "model": config.model.name,
            "parameter": name,
            "elements": sizes[name],
            "ready_elements": ready_elements,
            "seconds": {"min": min(columns[name]), "p50": median(columns[name]), "max": max(columns[name])},
        }
        for name, ready_elements in zip(order, accumulate(sizes[name] for name in order), strict=True)
    ]


def _table(config: ReadyConfig, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"{config.model.name}: gradients in the order they get ready", title_justify="left")
    table.add_column("parameter", no_wrap=True)
    for heading in ("elements so far", "p50", "min", "max"):
        table.add_column(heading, justify="right")
    apart = max(1, len(rows) // SHOWN)
    for row in rows[apart - 1 :: apart]:
        times = [f"{row['seconds'][name] * 1000:.1f} ms" for name in ("p50", "min", "max")]
        table.add_row(row["parameter"], f"{row['ready_elements']:,}", *times)
    return table
