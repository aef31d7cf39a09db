"""What the timeline of gradwire's DistributedDataParallel costs a step, on one rank and the 600 tiny layers of step_time.py.

Every call that the reducer makes to the timeline is timed; the clock around it counts, so this is an upper bound.
"""

import statistics
import time
from collections.abc import Callable
from inspect import isfunction

import torch
import torch.distributed as dist
from driver import parser_of
from step_time import tiny_layers
from torch import nn

import gradwire
from gradwire.ddp_core.measure.timeline import Timeline

STEPS, WARMUP_STEPS = 200, 20


class Meter:
    """Seconds that went into the methods of a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self.seconds, self.calls = 0.0, 0
        for name in [name for name, each in vars(Timeline).items() if isfunction(each) and not name.startswith("_")]:
            setattr(timeline, name, self.timed(getattr(timeline, name)))

    def timed(self, method: Callable) -> Callable:
        """The method, with what it takes added up."""

        def measured(*arguments: object) -> object:
            begin = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self.seconds += time.perf_counter() - begin
                self.calls += 1

        return measured


def step(model: nn.Module, inputs: torch.Tensor) -> None:
    """Forward and backward, nothing else."""
    model(inputs).sum().backward()
    model.zero_grad()


def main() -> None:
    """Print medians of a step and of the timeline's part of it."""
    parser = parser_of(__doc__)
    parser.add_argument("megabytes", nargs="?", type=float, default=25.0, help="size of a bucket")
    megabytes = parser.parse_args().megabytes
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = gradwire.DistributedDataParallel(tiny_layers(), bucket_cap_mb=megabytes, gradient_as_bucket_view=True)
    inputs = torch.randn(4, 16)
    for _ in range(WARMUP_STEPS):
        step(model, inputs)
    meter = Meter(model.timeline)
    steps, parts = [], []
    for _ in range(STEPS):
        before, begin = meter.seconds, time.perf_counter()
        step(model, inputs)
        steps.append(time.perf_counter() - begin)
        parts.append(meter.seconds - before)
    whole, part = statistics.median(steps), statistics.median(parts)
    print(f"{len(model.last_step().buckets)} buckets, {meter.calls / STEPS:.0f} calls a step")
    print(f"step {whole * 1e3:.1f} ms, timeline {part * 1e6:.0f} us, {part / whole:.3%}")
    model.compression.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
