"""Step times on a GPU with one rank of NCCL: what DDP and its hooks cost where nothing has to travel.

    python gpu_step.py gpu torch:none@25 gradwire:none@25 torch:bf16@25 gradwire:bf16@25 --json result.json

Cases are those of step_time.py. Bound by the `gpu`: a GPT of 162 M parameters under autocast, whose kernels take longer than
their launches. Bound by the `host`: 64 small layers, whose kernels wait for their launches; what a step takes longer than
the first case's, by the number of buckets, is the host's time a bucket. Cases take turns of a few steps, after which the
host waits for the device.

In a clone that is not installed, put its root on PYTHONPATH, as `make gpu` does.
"""

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import step_time
import torch
import torch.distributed as dist
from driver import about, parser_of, write_results
from torch import Tensor, nn

import gradwire
from gradwire import kernels

if TYPE_CHECKING:
    from rich.table import Table

VOCABULARY, TOKENS = 50_304, 512
WARM = 4  # steps before the first turn: buckets are built anew, kernels compiled
LARGE = 60 << 30  # bytes of a GPU that takes the whole batch


class Gpt(nn.Sequential):
    """A transformer of GPT-2's size, 12 layers of 768."""

    def __init__(self) -> None:
        block = nn.TransformerEncoderLayer(768, 12, 3072, 0.0, batch_first=True, norm_first=True)
        blocks = nn.TransformerEncoder(block, 12, enable_nested_tensor=False)
        super().__init__(nn.Embedding(VOCABULARY, 768), blocks, nn.Linear(768, VOCABULARY, bias=False))


def gpt_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Any loss of the outputs will do."""
    with torch.autocast("cuda", torch.bfloat16):
        return model(tokens).float().square().mean()


def tokens_of_the_gpu() -> Tensor:
    """A batch that keeps a GPU busy for longer than the host takes to launch its kernels."""
    batch = 64 if torch.cuda.get_device_properties(0).total_memory > LARGE else 16
    return torch.randint(0, VOCABULARY, (batch, TOKENS), device="cuda")


def small_layers() -> nn.Module:
    """64 layers, 16 MiB."""
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(64)))


@dataclass(frozen=True)
class Workload:
    """A model, its loss, its inputs, and how many steps a turn has."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor], Tensor]
    inputs: Callable[[], Tensor]
    steps: int


WORKLOADS = {
    "gpu": Workload(Gpt, gpt_loss, tokens_of_the_gpu, 2),
    "host": Workload(
        small_layers,
        lambda model, inputs: model(inputs).square().mean(),
        lambda: torch.randn(8, 256, device="cuda"),
        10,
    ),
}


class Case(step_time.Case):
    """A case on a GPU. `first_s`: of the first step with its compilation; `memory`: bytes at the peak of a step."""

    def __init__(self, name: str, workload: Workload) -> None:
        super().__init__(name, lambda: workload.build().cuda(), workload.loss)
        self.steps = workload.steps
        self.host: list[list[float]] = []  # seconds until a turn's last step was queued
        self.first_s, self.memory, self.buckets = 0.0, 0, 0

    def build_and_warm(self, inputs: Tensor) -> None:
        """Build the model, run its first steps, and note what they cost."""
        before = torch.cuda.memory_allocated()
        self.begin_round()
        self.host.append([])
        start = time.perf_counter()
        self._run(inputs, 1)
        torch.cuda.synchronize()
        self.first_s = self.first_s or time.perf_counter() - start
        self._run(inputs, WARM - 1)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._run(inputs, 1)
        self.memory = torch.cuda.max_memory_allocated() - before
        if isinstance(self.model, gradwire.DistributedDataParallel):
            self.buckets = len(self.model.compression.stats().buckets)

    def turn(self, inputs: Tensor) -> None:
        """Some steps, timed together."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        self._run(inputs, self.steps)
        self.host[-1].append((time.perf_counter() - start) / self.steps)
        torch.cuda.synchronize()
        self.rounds[-1].append((time.perf_counter() - start) / self.steps)

    def _run(self, inputs: Tensor, steps: int) -> None:
        for _ in range(steps):
            self.loss(self.model, inputs).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def row(self, first: "Case") -> dict[str, float | int | str | None]:
        """What it took, against the first case in the same turns."""
        mine, theirs = ([second for seconds in case.rounds for second in seconds] for case in (self, first))
        speeds = sorted(own / other for own, other in zip(mine, theirs, strict=True))
        extra = statistics.median(own - other for own, other in zip(mine, theirs, strict=True))
        return {
            "case": self.name,
            "median_s": statistics.median(mine),
            "host_s": statistics.median(second for seconds in self.host for second in seconds),
            "times_the_first": statistics.median(speeds),
            "quartiles": [speeds[len(speeds) // 4], speeds[-1 - len(speeds) // 4]],
            "first_step_s": self.first_s,
            "memory_mb": self.memory / 1e6,
            "buckets": self.buckets or None,
            "extra_a_bucket_s": extra / self.buckets if self.buckets else None,
        }


def measured(names: list[str], workload: Workload, rounds: int, turns: int) -> list[dict]:
    """The rows of all cases, which take turns."""
    inputs = workload.inputs()
    cases = [Case(name, workload) for name in names]
    for played in range(rounds):
        order = cases[::-1] if played % 2 else cases
        for case in order:
            case.build_and_warm(inputs)
        for turn in range(turns):
            for place in range(len(cases)):
                order[(turn + place) % len(cases)].turn(inputs)
        for case in order:
            case.end_round()
    return [case.row(cases[0]) for case in cases]


def show(rows: list[dict], bound: str) -> None:
    """Print a table, or a line of JSON for each case where rich is not installed."""
    if find_spec("rich") is None:
        print(*map(json.dumps, rows), sep="\n")
        return
    from rich.console import Console

    Console(width=130).print(table(rows, bound))


def table(rows: list[dict], bound: str) -> "Table":
    """For a terminal."""
    from rich.table import Table

    shown = Table(title=f"a step, one rank of NCCL, bound by the {bound}; against {rows[0]['case']} of the same turn")
    headings = ("case", "median", "queued", "times the first", "quartiles", "first step", "memory", "a bucket more")
    for heading in headings:
        shown.add_column(heading, justify="left" if heading == "case" else "right")
    for row in rows:
        extra = row["extra_a_bucket_s"]
        shown.add_row(
            row["case"],
            *(f"{1000 * row[name]:.2f} ms" for name in ("median_s", "host_s")),
            f"{row['times_the_first']:.3f}x",
            "{:.3f} to {:.3f}".format(*row["quartiles"]),
            f"{row['first_step_s']:.2f} s",
            f"{row['memory_mb']:,.0f} MB",
            "" if extra is None else f"{1000 * extra:.3f} ms",
        )
    return shown


def main() -> None:
    """Run the cases in turn on this process alone."""
    parser = parser_of(__doc__)
    parser.add_argument("bound", choices=WORKLOADS)
    parser.add_argument("cases", nargs="+", metavar="WHAT@MEGABYTES")
    parser.add_argument("--rounds", type=int, default=3, help="how often all cases are built anew")
    parser.add_argument("--turns", type=int, default=6, help="of each case in a round")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29507")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1)
    rows = measured(arguments.cases, WORKLOADS[arguments.bound], arguments.rounds, arguments.turns)
    show(rows, arguments.bound)
    settings = {name: getattr(arguments, name) for name in ("bound", "rounds", "turns")}
    backends = [each.name for each in kernels.backends() if each.available]
    write_results(arguments.json, {**about("cuda"), "backends": backends, **settings, "cases": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
