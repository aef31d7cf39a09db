"""What a step could take at best: its computation and what its link has to carry, if nothing else took any time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...ddp_core.overlap.bounds import optimal, synchronous
from ...ddp_core.overlap.link_cost import LinkCost
from ...ddp_core.overlap.step_model import StepModel
from ..network.link import parse_rate
from ..workloads.emulation import step_by_layers
from .config import BenchConfig
from .rows import NO_DDP, Case

BOUND, SYNCHRONOUS_BOUND, BOUND_HERE = "bound_seconds", "synchronous_bound_seconds", "bound_here_seconds"


def bounds(config: BenchConfig, case: Case, world_size: int) -> dict[str, Any]:
    """T*, the least seconds of an iteration in any order of sending, and the least if forward waits for all of it.

    Known of an emulated accelerator alone (None otherwise), and of iterations that all average gradients.
    """
    step = _step(config, case, world_size)
    if step is None:
        return {BOUND: None, SYNCHRONOUS_BOUND: None}
    return {BOUND: optimal(step), SYNCHRONOUS_BOUND: synchronous(step)}


def bound_here(config: BenchConfig, case: Case, world_size: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """T* of this machine, on which forward and backward, and the optimizer, took what a `row` tells."""
    step = _step(config, case, world_size, row["stretch"] or 1.0)
    return {BOUND_HERE: None if step is None else optimal(step) + row["phases"]["optimizer"]}


def _step(config: BenchConfig, case: Case, world_size: int, stretch: float = 1.0) -> StepModel | None:
    trace = config.trace
    if trace is None or case.ddp == NO_DDP.ddp or case.sync_every > 1:
        return None
    return step_by_layers(trace, case.compressor, world_size, link_cost(config), config.dilate * stretch)


def link_cost(config: BenchConfig) -> LinkCost:
    """Of the slower of what is emulated, at its nominal rate; nothing where the network has no limit."""
    rates = map(parse_rate, (config.slowed_link or "0", config.slowed_netlab.rate))
    slowest = min(filter(None, rates), default=0.0)
    return LinkCost(0.0, 1 / slowest if slowest else 0.0)
