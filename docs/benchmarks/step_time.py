"""Step times of torch's own hooks and of gradwire's, turn by turn in one run on one network.

Start it once on every host, by torchrun or by gradwire netlab:

    gradwire netlab --hosts 4 --rate 100mbit -- python step_time.py torch:powersgd@4000 powersgd:rank=1@25 --json result.json

A case is WHAT@MEGABYTES, the latter the size of the buckets. WHAT is a gradwire specification, hooked on torch's DDP;
gradwire:SPECIFICATION, with gradwire's own DDP; torch:none, torch:fp16, torch:bf16, torch:powersgd (rank 1; on Gloo it
needs one bucket); fsdp:torch and fsdp:WEIGHTS/GRADIENTS, torch's FSDP2 with its own communication and with gradwire's, a
module a block and no buckets (fsdp:int8/int4@0); replicate:SPECIFICATION, torch's replicate with gradwire's hook
(replicate:torch without), a module a block; overlap:SPECIFICATION, gradwire's own DDP with gradwire.overlap;
graph:SPECIFICATION, rounds in the compiled graph (see round_in_graph.py); or alone:none, with no DDP at all, and no
communication. compiled+WHAT compiles the model by torch.compile. The model is a
transformer of 19.2 M parameters; with --model tiny 600 layers of 272; with --model matrices 75 of 128 x 128.

Where memory comes to lie is worth a few percent of a step, and stays as long as the models do. To tell smaller differences,
--rounds N builds all cases N times, every other time in reverse order. The speed is then the mean of the rounds' medians,
with their 95 % interval by Student's t. Of one round, it is the median of the turns with its 95 % interval; fewer than six
turns have their range.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from driver import about, parser_of, write_results
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradwire

if TYPE_CHECKING:
    from rich.table import Table

VOCABULARY, WIDTH, LAYERS, BATCH, TOKENS = 256, 512, 6, 4, 32
WARMUP_STEPS = 4  # DDP rebuilds its buckets, torch's PowerSGD starts
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # 95 %, by degrees of freedom from 1


def powersgd_state() -> powerSGD_hook.PowerSGDState:
    """torch's PowerSGD as early as it can start."""
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)


TORCH_HOOKS: dict[str, Callable[[], tuple]] = {
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "bf16": lambda: (None, default_hooks.bf16_compress_hook),
    "powersgd": lambda: (powersgd_state(), powerSGD_hook.powerSGD_hook),
}


class Transformer(nn.Sequential):
    """A byte-level transformer: embedding, blocks, output layer."""

    def __init__(self) -> None:
        block = nn.TransformerEncoderLayer(WIDTH, WIDTH // 64, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        super().__init__(nn.Embedding(VOCABULARY, WIDTH), blocks, nn.Linear(WIDTH, VOCABULARY))


def next_byte_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """How well a transformer predicts the next byte."""
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def tiny_layers() -> nn.Module:
    """Much work per parameter for whoever handles gradients one by one."""
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(600)))


def matrices() -> nn.Module:
    """Many matrices to compress, small enough to be one bucket."""
    return nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(75)))


def replicated(model: nn.Module) -> nn.Module:
    """torch's replicate of every block, and of what is left."""
    from torch.distributed._composable.replicate_with_fsdp import replicate  # which older versions of torch do not have

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*(each for each in model.modules() if isinstance(each, nn.TransformerEncoderLayer)), model):
        replicate(module, mesh=mesh)
    return model


def sharded(model: nn.Module) -> nn.Module:
    """FSDP2 of every block, and of what is left; each has the next one's weights gathered while it computes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = [module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh)
    for module, following in pairwise([model, *blocks]):
        module.set_modules_to_forward_prefetch([following])
    return model


def sum_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Any loss will do."""
    width = next(model.parameters()).shape[-1]
    return model(tokens[:, :width].float().repeat(1, -(-width // tokens.shape[1]))[:, :width]).sum()


MODELS = {
    "transformer": (Transformer, next_byte_loss),
    "tiny": (tiny_layers, sum_loss),
    "matrices": (matrices, sum_loss),
}


class Case:
    """A model with a hook, built anew in every round, and the seconds that its steps took."""

    def __init__(self, name: str, build: Callable[[], nn.Module], loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
        self.name, self.build, self.loss = name, build, loss
        self.rounds: list[list[float]] = []  # seconds of each step
        self.processor_seconds: list[list[float]] = []  # of all threads of this rank

    def begin_round(self) -> None:
        """Build the model and its hook."""
        what, _, megabytes = self.name.rpartition("@")
        torch.manual_seed(0)
        settings = {"bucket_cap_mb": float(megabytes), "gradient_as_bucket_view": True}
        compiled, what = what.startswith("compiled+"), what.removeprefix("compiled+")
        kind, _, hook = what.partition(":")
        self.closing = nullcontext()
        if kind == "fsdp":
            self.model = sharded(self.build())
            if hook != "torch":
                gather, _, reduce = hook.partition("/")
                self.closing = closing(gradwire.attach(self.model, gather=gather, reduce=reduce))
        elif kind == "replicate":
            self.model = replicated(self.build())
            if hook != "torch":
                self.closing = closing(gradwire.attach(self.model, hook))
        elif kind in ("gradwire", "overlap"):
            self.model = gradwire.DistributedDataParallel(self.build(), compressor=hook, **settings)
            self.closing = closing(self.model.compression)
        elif kind == "graph":
            from round_in_graph import InGraph  # which older versions of gradwire cannot serve

            self.model = InGraph(self.build(), hook)
        elif kind == "alone":
            self.model = self.build()
        else:
            self.model = DistributedDataParallel(self.build(), **settings)
        if hook in TORCH_HOOKS and kind == "torch":
            self.model.register_comm_hook(*TORCH_HOOKS[hook]())
        elif kind not in ("torch", "gradwire", "overlap", "fsdp", "replicate", "graph", "alone"):
            self.closing = closing(gradwire.attach(self.model, what))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        if kind == "overlap":
            gradwire.overlap(self.model, self.optimizer, order="priority")
        if compiled:
            self.model = torch.compile(self.model)
        self.rounds.append([])
        self.processor_seconds.append([])

    def step(self, tokens: Tensor) -> None:
        """One timed training step, all ranks starting together."""
        dist.barrier()
        start, processor_start = time.perf_counter(), time.process_time()
        self.loss(self.model, tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.rounds[-1].append(time.perf_counter() - start)
        self.processor_seconds[-1].append(time.process_time() - processor_start)

    def end_round(self) -> None:
        """Free the model and its hook."""
        with self.closing:
            del self.model, self.optimizer

    def figures(self, baseline: "Case") -> dict[str, float | str | list[float]]:
        """Seconds of the measured steps, and how many times as fast they were as the baseline's of the same turns."""
        measured = [second for seconds in self.rounds for second in seconds[WARMUP_STEPS:]]
        speeds = [
            [other / own for own, other in zip(mine, others, strict=True)][WARMUP_STEPS:]
            for mine, others in zip(self.rounds, baseline.rounds, strict=True)
        ]
        medians = [statistics.median(each) for each in speeds]
        speed, low, high = mean_of(medians) if len(medians) > 1 else median_of(speeds[0])
        return {
            "case": self.name,
            "median_s": statistics.median(measured),
            "min_s": min(measured),
            "max_s": max(measured),
            "processor_s": statistics.median(s for seconds in self.processor_seconds for s in seconds[WARMUP_STEPS:]),
            "speed": speed,
            "speed_low": low,
            "speed_high": high,
            "rounds": medians,
        }


def mean_of(rounds: list[float]) -> tuple[float, float, float]:
    """The mean of the rounds, with the ends of its 95 % interval by Student's t."""
    mean, quantile = statistics.fmean(rounds), STUDENT[min(len(rounds) - 1, len(STUDENT)) - 1]
    half = quantile * statistics.stdev(rounds) / math.sqrt(len(rounds))
    return mean, mean - half, mean + half


def median_of(turns: list[float]) -> tuple[float, float, float]:
    """The median of the turns, with the ends of its 95 % interval (binomial distribution); of few turns, their range."""
    ordered = sorted(turns)
    outside = max(0, math.floor(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))))
    return statistics.median(ordered), ordered[outside], ordered[-1 - outside]


def play_round(cases: list[Case], steps: int, generator: torch.Generator) -> None:
    """Build all cases, run them turn by turn, and free them."""
    for case in cases:
        case.begin_round()
    for step in range(WARMUP_STEPS + steps):
        tokens = torch.randint(0, VOCABULARY, (BATCH, TOKENS + 1), generator=generator)
        for turn in range(len(cases)):
            cases[(step + turn) % len(cases)].step(tokens)
    dist.barrier()
    for case in cases:
        case.end_round()
    gc.collect()


def table(rows: list[dict], world_size: int) -> "Table":
    """The cases, each against the first, with the 95 % interval."""
    from rich.table import Table  # here, since gpu_step.py does without

    shown = Table(title=f"seconds a step, {world_size} ranks; speed against {rows[0]['case']} of the same turn")
    shown.add_column("case")
    for heading in ("median", "min", "max", "processor", "speed", "95 % interval"):
        shown.add_column(heading, justify="right")
    for row in rows:
        seconds = [f"{row[key]:.3f}" for key in ("median_s", "min_s", "max_s", "processor_s")]
        interval = f"{row['speed_low']:.3f} to {row['speed_high']:.3f}"
        shown.add_row(row["case"], *seconds, f"{row['speed']:.3f}x", interval)
    return shown


def main() -> None:
    """Run the cases turn by turn and show them on rank 0."""
    parser = parser_of(__doc__)
    parser.add_argument("cases", nargs="+", metavar="WHAT@MEGABYTES")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each case in a round")
    parser.add_argument("--rounds", type=int, default=1, help="how often all cases are built anew")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", choices=MODELS, default="transformer")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dist.init_process_group("gloo")
    cases = [Case(name, *MODELS[arguments.model]) for name in arguments.cases]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for played in range(arguments.rounds):
        play_round(cases[::-1] if played % 2 else cases, arguments.steps, generator)
    if dist.get_rank() == 0:
        rows = [case.figures(cases[0]) for case in cases]
        from rich.console import Console

        Console(width=110).print(table(rows, dist.get_world_size()))
        settings = {"rounds": arguments.rounds, "steps": arguments.steps}
        write_results(arguments.json, {**about(), **settings, "cases": rows})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
