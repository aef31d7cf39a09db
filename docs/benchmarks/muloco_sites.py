"""Validation losses of local SGD with AdamW and Muon, by sites and by bits per element, beside training in one place.

    python docs/benchmarks/muloco_sites.py docs/results/papers/muloco-sites.json

DiLoCo is local SGD with AdamW inside, and MuLoCo the same with Muon. The sites are simulated in one process. All runs read
8 sequences per step, whichever number of sites shares them. The outer optimizer of each number of sites is the best of a
list, uncompressed and with the first seed. Runs that the file has are skipped.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from driver import parser_of
from finished_runs import FinishedRuns
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.compress import Layout, Ranks, Simulation, compressor
from gradwire.experiments.compare.config import CompareConfig
from gradwire.experiments.workloads.data import DataConfig, Dataset, load_dataset
from gradwire.experiments.workloads.evaluation import evaluation_of, held_out_sums
from gradwire.experiments.workloads.models import ModelConfig
from gradwire.experiments.workloads.optimizers import optimizers_for, schedule_for
from gradwire.experiments.workloads.training import initial_model, loss_of
from gradwire.hooks.local_sgd.outer import outer

CPU = torch.device("cpu")
MODEL = ModelConfig("gpt", width=64, layers=2, heads=2, context=64)
SEQUENCES, STEPS, EVERY, WARMUP, LR, EVAL_BATCHES = 8, 120, 15, 12, 0.01, 128
OUTER = ("sgd:lr=1,momentum=0", "nesterov:lr=0.7,momentum=0.6")
BITS = {32: "none", 8: "int8", 4: "int4", 2: "int2"}
SITES = (1, 4, 8)
NAMES = {
    "adamw": ("AdamW", "local SGD with AdamW"),
    "muon": ("Muon", "local SGD with Muon"),
}  # of data-parallel training, and of local SGD


@dataclass(frozen=True)
class Run:
    """One training. `sites` 0: in one place, with every gradient averaged; `outer` is then empty and `bits` 32."""

    optimizer: str
    sites: int = 0
    bits: int = 32
    outer: str = ""
    seed: int = 0

    @property
    def config(self) -> CompareConfig:
        """Return the settings of the training."""
        return CompareConfig(simulated=True, model=MODEL, steps=STEPS, seed=self.seed, batch_size=SEQUENCES)


class Site:
    """A model with optimizers and batches of its own."""

    def __init__(self, model: nn.Module, name: str, batches: Iterator[Any]) -> None:
        self.model, self.batches = model, batches
        self.optimizers: list[Optimizer] = optimizers_for(model, "none", name, LR, 0.0)
        self.schedules = [schedule_for(each, "cosine", WARMUP, STEPS) for each in self.optimizers]

    def step(self) -> None:
        """Train on one batch."""
        loss_of(self.model, *next(self.batches)).backward()
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    def flat(self) -> Tensor:
        """Return a flat copy of all parameters."""
        return torch.cat([each.detach().reshape(-1) for each in self.model.parameters()])

    def put(self, flat: Tensor) -> None:
        """Set all parameters."""
        nn.utils.vector_to_parameters(flat, self.model.parameters())


def sites_of(run: Run, dataset: Dataset) -> list[Site]:
    """Return the sites at the start: the same model, and batches that share the sequences of a step."""
    count = max(1, run.sites)
    model = initial_model(run.config, dataset, CPU)
    batches = [
        dataset.train_batches(SEQUENCES // count, seed=run.seed, rank=rank, world_size=count) for rank in range(count)
    ]
    return [Site(copy.deepcopy(model), run.optimizer, each) for each in batches]


def synchronized(sites: list[Site], anchor: Tensor, momentum: Tensor, averages: Simulation, run: Run) -> None:
    """Move `anchor` by the outer optimizer along the average of the sites' differences, and all sites to it."""
    difference = averages.step([anchor - site.flat() for site in sites])[0]
    outer(run.outer).step(anchor, difference, momentum)
    for site in sites:
        site.put(anchor)


def trained(run: Run, dataset: Dataset) -> nn.Module:
    """Return the model at the end."""
    sites = sites_of(run, dataset)
    named = dict(sites[0].model.named_parameters())
    shapes = tuple(tuple(each.shape) for each in named.values())
    layout = Layout(tuple(named), shapes, torch.float32, CPU, Ranks(len(sites)))
    averages = Simulation(compressor(BITS[run.bits]), layout)
    anchor = sites[0].flat()
    momentum = torch.zeros_like(anchor)
    for step in range(1, STEPS + 1):
        for site in sites:
            site.step()
        if run.sites and step % EVERY == 0:
            synchronized(sites, anchor, momentum, averages, run)
    return sites[0].model


def loss(run: Run, dataset: Dataset) -> float:
    """Return the validation loss at the end."""
    model = trained(run, dataset)
    return evaluation_of(held_out_sums(model, dataset.evaluation_batches(4, EVAL_BATCHES), CPU)).loss


class Known(FinishedRuns):
    """The finished runs of a file, and those that are asked for."""

    @cached_property
    def dataset(self) -> Dataset:
        """Return the data, read at the first training."""
        return load_dataset(DataConfig(), MODEL)

    def loss(self, run: Run) -> float:
        """Return the loss of a run, from the file or by training."""
        for each in self.missing([vars(run)]):
            self.add(each, loss=round(loss(run, self.dataset), 6))
        return self.find(vars(run))["loss"]

    def best_outer(self, optimizer: str, sites: int) -> str:
        """Return the outer optimizer with the smallest loss, uncompressed and with seed 0."""
        return min(OUTER, key=lambda each: self.loss(Run(optimizer, sites, outer=each)))


def lines(known: Known, seeds: range) -> Iterator[str]:
    """Yield the page's table; a percentage is above the data-parallel training with the same optimizer and seed."""
    yield "| optimizer | sites | outer optimizer | 32 bits | 8 bits | 4 bits | 2 bits |"
    yield "|---" * 7 + "|"
    for optimizer, (parallel, local) in NAMES.items():
        base = [known.loss(Run(optimizer, seed=seed)) for seed in seeds]
        yield f"| {parallel}, data parallel | - | - | {sum(base) / len(base):.3f} | | | |"
        for sites in SITES:
            chosen = known.best_outer(optimizer, sites)
            cells = [local, str(sites), f"`{chosen}`"]
            for bits in BITS if sites > 1 else [32]:
                found = [known.loss(Run(optimizer, sites, bits, chosen, seed)) for seed in seeds]
                above = [100 * (each / none - 1) for each, none in zip(found, base, strict=True)]
                cells.append(f"{sum(found) / len(found):.3f} ({sum(above) / len(above):+.1f} %)")
            yield f"| {' | '.join(cells + [''] * (7 - len(cells)))} |"


def main() -> None:
    """Run all that the file lacks, and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path, help="of the results, which grows by a run at a time")
    parser.add_argument("--seeds", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("\n".join(lines(Known(asked.file), range(asked.seeds))))


if __name__ == "__main__":
    main()
