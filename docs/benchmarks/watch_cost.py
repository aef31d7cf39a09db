"""What `handle.watch(every=100, folder=...)` costs a step: blocks of steps with it and without, in turns, in one run.

    torchrun --nproc-per-node 2 watch_cost.py [COMPRESSOR] [--blocks 20] [--every 100]

The model is the 600 tiny layers of step_time.py in small buckets: many of them, and a short step. A block is `every` steps
and has one report in its middle, to a console that goes nowhere and to a folder. Beside that the seconds are timed which
training's thread spends in reports, and those of them in which it had a core.
"""

import io
import statistics
import tempfile
import time
from contextlib import closing, nullcontext

import torch
import torch.distributed as dist
from driver import parser_of
from rich.console import Console
from step_time import sum_loss, tiny_layers
from torch import nn

import gradwire
from gradwire.ddp_core.measure.step import Step
from gradwire.ddp_core.watching.watch import Watch

BUCKET_MB = 0.1


class Training:
    """Steps of one rank, and the seconds that reports took in them."""

    def __init__(self, compressor: str) -> None:
        self.model = nn.parallel.DistributedDataParallel(tiny_layers(), bucket_cap_mb=BUCKET_MB)
        self.handle = gradwire.attach(self.model, compressor)
        self.told, self.computed = 0.0, 0.0

    def steps(self, count: int) -> float:
        """Seconds of so many, all ranks starting together."""
        tokens = torch.zeros(4, 17)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(count):
            sum_loss(self.model, tokens).backward()
            self.model.zero_grad()
        return time.perf_counter() - began

    def block(self, every: int, folder: str | None) -> float:
        """Seconds of a block, watched if there is a folder."""
        watch = self.handle.watch(every, Console(file=io.StringIO()), folder=folder) if folder else nullcontext()
        if folder:
            self.time_reports(watch)
        with watch:
            return self.steps(every)

    def time_reports(self, watch: Watch) -> None:
        """Add up what training's thread spends in them."""
        told = watch.step_begins

        def timed(step: Step, ended: int) -> None:
            began, computed = time.perf_counter(), time.thread_time()
            told(step, ended)
            self.computed += time.thread_time() - computed
            self.told += time.perf_counter() - began

        watch.step_begins = timed


def main() -> None:
    """Print the medians, their ratio, and what reports took."""
    parser = parser_of(__doc__)
    parser.add_argument("compressor", nargs="?", default="topk:ratio=0.01")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--every", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training, every = Training(arguments.compressor), arguments.every
    with closing(training.handle), tempfile.TemporaryDirectory() as folder:
        training.steps(every + every // 2)  # buckets are made anew, and reports come in the middle of blocks
        pairs = []
        for block in range(arguments.blocks):
            order = (folder, None) if block % 2 else (None, folder)
            seconds = {place: training.block(every, place) for place in order}
            pairs.append((seconds[folder] / every, seconds[None] / every))
    if dist.get_rank() == 0:
        ratios = sorted(watched / alone for watched, alone in pairs)
        watched, alone = (statistics.median(column) for column in zip(*pairs, strict=True))
        quarter = len(ratios) // 4
        print(f"step {alone * 1e3:.2f} ms, watched {watched * 1e3:.2f} ms, {len(pairs)} pairs of blocks in turns")
        middle = f"the middle {len(ratios) - 2 * quarter} pairs {ratios[quarter]:.4f} to {ratios[-1 - quarter]:.4f}"
        print(f"ratio {statistics.median(ratios):.4f}, {middle}")
        share, computed = (seconds / len(pairs) / every for seconds in (training.told, training.computed))
        print(f"reports in training's thread: {share * 1e6:.1f} us a step, {share / alone:.3%} of it")
        print(f"on a core {computed * 1e6:.1f} us of these")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
