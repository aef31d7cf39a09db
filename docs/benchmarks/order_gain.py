"""How much faster steps in a planned order are than in the better of two fixed ones, for the traces that come with gradwire.

    python docs/benchmarks/order_gain.py

prints the table in docs/overlap.md. Fixed orders: backward's, and forward's.
"""

from collections.abc import Iterator
from statistics import median

from gradwire.ddp_core.measure.link_schedule import arrivals, backward_order, priority_order, step_seconds
from gradwire.ddp_core.measure.step_model import LinkCost, StepModel
from gradwire.experiments.workloads.emulation import load_trace
from gradwire.experiments.workloads.emulation.shipped import SHIPPED
from gradwire.experiments.workloads.emulation.step_model import step_by_slices

SPECS, GIGABITS, RANKS = ("none", "bf16", "int8", "int4"), (1, 4, 10, 25), 4
LATENCY = 50e-6  # seconds of a collective
WORTH = 0.03


def gain(step: StepModel) -> float:
    """Return the part by which the better fixed order's step is longer than the planned one's."""
    forward = sorted(range(len(step.pieces)), key=lambda place: step.pieces[place].needed)
    orders = (backward_order(step), forward, priority_order(step))
    *fixed, planned = (step_seconds(step, arrivals(step, order)) for order in orders)
    return min(fixed) / planned - 1


def rows() -> Iterator[str]:
    """Yield the table."""
    yield "| compressor | cases | gain of 3 % or more | median of those | most |\n|---|---|---|---|---|"
    for spec in SPECS:
        gains = [
            gain(step_by_slices(load_trace(name), spec, RANKS, LinkCost(LATENCY, 8 / (rate * 1e9))))
            for name in SHIPPED
            for rate in GIGABITS
        ]
        worth = [each for each in gains if each >= WORTH]
        yield f"| `{spec}` | {len(gains)} | {len(worth)} | {median(worth):.0%} | {max(gains):.0%} |"


if __name__ == "__main__":
    print("\n".join(rows()))
