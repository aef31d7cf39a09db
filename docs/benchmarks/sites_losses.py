"""Validation loss of a small GPT by local SGD on four simulated sites, as `gradwire plan --sites` plans it.

    python sites_losses.py --every 8 --fragments 1 --seeds 0 1 2 --json sites-losses.json

`--every 0` averages every step's gradients. `--warm-up N` does so for the first N steps, before local SGD begins.
`--optimizer muon` has AdamW beside it. Runs that the file has are skipped.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from driver import parser_of
from finished_runs import FinishedRuns

from gradwire import LocalSteps
from gradwire.experiments.compare.config import CompareConfig
from gradwire.experiments.workloads.data import Dataset, load_dataset
from gradwire.experiments.workloads.evaluation import evaluation_of, held_out_sums
from gradwire.experiments.workloads.models import ModelConfig
from gradwire.experiments.workloads.simulated import SimulatedTraining
from gradwire.experiments.workloads.simulated_sites import CPU, Exchange, SimulatedSites, Site, together
from gradwire.experiments.workloads.training import loss_of

SITES, EVAL_BATCHES, LIMIT = 4, 64, timedelta(minutes=10)
MODEL = ModelConfig("gpt", width=64, layers=2, heads=2, context=64)


def config_of(asked: argparse.Namespace, seed: int) -> CompareConfig:
    """Return the settings of a training."""
    config = CompareConfig(simulated=True, nproc=SITES, model=MODEL, batch_size=4, steps=asked.steps, seed=seed)
    return replace(
        config,
        optimizer=asked.optimizer,
        lr=asked.lr,
        warmup=15,
        schedule="cosine",
        local_every=asked.every,
        timeout=600,
    )


def at_every_step(config: CompareConfig, dataset: Dataset, spec: str) -> torch.nn.Module:
    """Return the model that averages every step's gradients have trained."""
    training = SimulatedTraining(spec, replace(config, local_every=0), dataset, SITES)
    while training.done < config.steps:
        training.step()
    return training.model


def averaged_step(sites: Sequence[Site]) -> None:
    """Make a step with the mean of all sites' gradients."""
    for site in sites:
        loss_of(site.model, *next(site.batches)).backward()
    for parameters in zip(*(site.model.parameters() for site in sites), strict=True):
        mean = sum(each.grad for each in parameters) / len(sites)
        for each in parameters:
            each.grad = mean.clone()
    for site in sites:
        for optimizer, schedule in zip(site.optimizers, site.schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


def begun(site: Site, place: int, exchange: Exchange, asked: argparse.Namespace) -> Callable[[], LocalSteps]:
    """Return the function that begins local SGD at a site: it waits for the others."""
    at = SimulatedSites(exchange, place, LIMIT)
    options = {"every": asked.every, "fragments": asked.fragments, "compressor": asked.compressor, "outer": asked.outer}
    return lambda: LocalSteps(site.model, site.optimizers, at=at, **options)


def by_local_sgd(config: CompareConfig, dataset: Dataset, asked: argparse.Namespace) -> torch.nn.Module:
    """Return the model that all sites end with."""
    exchange = Exchange(SITES)
    sites = [Site(asked.compressor, config, dataset, exchange, place) for place in range(SITES)]
    for _ in range(asked.warm_up):
        averaged_step(sites)
    local = together([begun(site, place, exchange, asked) for place, site in enumerate(sites)])
    for _ in range(asked.warm_up, config.steps):
        for site in sites:
            site.step(synced=True)
    together([each.synchronize for each in local])
    for each in local:
        each.close()
    return sites[0].model


def loss(asked: argparse.Namespace, seed: int) -> float:
    """Return the validation loss at the end of a training."""
    config = config_of(asked, seed)
    dataset = load_dataset(config.data, config.model)
    model = by_local_sgd(config, dataset, asked) if asked.every else at_every_step(config, dataset, asked.compressor)
    return evaluation_of(held_out_sums(model, dataset.evaluation_batches(config.batch_size, EVAL_BATCHES), CPU)).loss


def main() -> None:
    """Train once with each seed, and print the losses and their mean."""
    parser = parser_of(__doc__)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--fragments", type=int, default=4)
    parser.add_argument("--compressor", default="none")
    parser.add_argument("--outer", default="average")
    parser.add_argument("--warm-up", type=int, default=0)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--lr", type=float, default=0.006)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, help="the file of losses, which grows by a run at a time")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.json:
        options = {name: value for name, value in vars(asked).items() if name not in ("seeds", "json")}
        finished = FinishedRuns(asked.json)
        for run in finished.missing({**options, "seed": seed} for seed in asked.seeds):
            finished.add(run, loss=round(loss(asked, run["seed"]), 5))
        losses = [finished.find({**options, "seed": seed})["loss"] for seed in asked.seeds]
    else:
        losses = [loss(asked, seed) for seed in asked.seeds]
    print(*(f"{each:.3f}" for each in losses), f"mean {sum(losses) / len(losses):.3f}")


if __name__ == "__main__":
    main()
