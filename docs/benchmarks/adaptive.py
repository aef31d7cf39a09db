"""Seconds to a loss by adaptive compression and by each fixed method, over links of several rates; computed, not measured.

    python adaptive.py --seeds 0 1 2 --json result.json

The models of the study quality train on simulated ranks, whose gradients, residuals and averages are those of real ones. A
step is given `--computation` seconds, a third of them forward; a bucket is ready when backward has come by as many
elements, and its bytes then hold the link. Arithmetic of the methods is free. `adaptive:budget=` sees these seconds as it
would see measured ones. The target is the smoothed training loss that bf16 ends with, and 1 % more.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from gradwire.compress import compressor
from gradwire.compress.agreed import Choice, choices
from gradwire.ddp_core.averaging.hiding import hiding_of
from gradwire.ddp_core.measure.record import Record
from gradwire.ddp_core.measure.step import BucketStats, Step
from gradwire.experiments.cli.commands import COMMANDS
from gradwire.experiments.cli.parsing import configuration
from gradwire.experiments.network.link import parse_rate
from gradwire.experiments.results.statistics import smoothed
from gradwire.experiments.workloads.data import load_dataset
from gradwire.experiments.workloads.optimizers import optimizer_for, schedule_for
from gradwire.experiments.workloads.sample import Batch
from gradwire.experiments.workloads.simulated import CPU, SimulatedRanks
from gradwire.experiments.workloads.training import initial_model, loss_of

CASES = {
    "gpt": "--model gpt --model.width 64 --model.layers 2 --model.heads 2 --model.context 64 --data text "
    "--optimizer adamw --lr 0.01 --warmup 12 --steps 120 --batch_size 4",
    "resnet": "--model resnet18-cifar --model.width 8 --model.layers 1 --data patterns --optimizer sgd --momentum 0.9 "
    "--lr 0.05 --warmup 8 --steps 80 --batch_size 16",
    "lstm": "--model lstm --model.width 96 --model.layers 1 --model.vocabulary 256 --model.context 64 --data text "
    "--optimizer sgd --momentum 0.9 --lr 2.0 --warmup 15 --steps 150 --batch_size 4",
}
FIXED = (
    "none",
    "bf16",
    "int8",
    "int4",
    "ternary",
    "powersgd:rank=4",
    "topk:ratio=0.01",
    "topk:ratio=0.01,feedback=0.9",
)
TARGET, WITHIN = "bf16", 1.01


class Run(NamedTuple):
    """The loss of each step, the bytes that each bucket sent in it, and when in a step each bucket is ready."""

    losses: list[float]
    sent: list[list[float]]
    ready: list[float]

    def times(self, rate: float) -> list[float]:
        """When each step ends; computation ends with the last bucket."""
        ends, now = [], 0.0
        for sent in self.sent:
            now += held(self.ready, sent, rate)[-1][1]
            ends.append(now)
        return ends

    def reaches(self, loss: float, rate: float) -> float | None:
        """Seconds until the smoothed loss is as low; None where it never is."""
        ends = zip(smoothed(self.losses), self.times(rate), strict=True)
        return next((at for reached, at in ends if reached <= loss), None)


class Bucket(NamedTuple):
    """What a watcher of times looks at."""

    choice: Choice | None


def held(ready: Sequence[float], sent: Sequence[float], rate: float) -> list[tuple[float, float]]:
    """When each bucket begins and ends to hold the link."""
    found, free = [], 0.0
    for at, size in zip(ready, sent, strict=True):
        begins = max(free, at)
        free = begins + size / rate
        found.append((begins, free))
    return found


def readiness(ranks: SimulatedRanks, computation: float) -> list[float]:
    """Seconds from the beginning of a step until each bucket's gradients are there."""
    sizes = [bucket.layouts[0].numel for bucket in ranks.buckets]
    return [computation * (1 + 2 * sum(sizes[: place + 1]) / sum(sizes)) / 3 for place in range(len(sizes))]


def measured(ranks: SimulatedRanks, run: Run, rate: float, began: float) -> Step:
    """The last step as a rank would have measured it."""
    times, programs = held(run.ready, run.sent[-1], rate), []
    for bucket, at, size, (begins, ends) in zip(ranks.buckets, run.ready, run.sent[-1], times, strict=True):
        spans = [("encode", began + at, began + at), ("wait", began + begins, began + ends)]
        programs.append(BucketStats(bucket.layouts[0].names, 0, Record([("all", 0, size)], spans)))
    return Step(programs=programs)


def trained(case: str, spec: str, world_size: int, seed: int, computation: float, rate: float) -> Run:
    """A training; the rate matters to a compressor that watches times."""
    flags = ["--compressors", f"[{spec!r}]", "--schedule", "cosine", "--bucket_mb", "0.1", "--seed", str(seed)]
    config = configuration(COMMANDS["compare"], "gradwire compare", [*CASES[case].split(), *flags])
    dataset, training = load_dataset(config.data, config.model), config.training
    model = initial_model(training, dataset, CPU)
    ranks = SimulatedRanks(model, compressor(spec), world_size, training.bucket_mb)
    optimizer = optimizer_for(model, spec, training.optimizer, training.lr, training.momentum)
    schedule = schedule_for(optimizer, training.schedule, training.warmup, training.optimizer_steps)
    places = [{"seed": seed, "rank": rank, "world_size": world_size} for rank in range(world_size)]
    batches = [dataset.train_batches(training.batch_size, **place) for place in places]
    run, hiding, last = Run([], [], readiness(ranks, computation)), hiding_of(compressor(spec)), None
    named = [(each.layouts[0].names, Bucket(next(choices(each.states[0]), None))) for each in ranks.buckets]
    for number in range(training.steps):
        run.losses.append(
            statistics.mean(step_loss(model, ranks, rank, next(batches[rank])) for rank in range(world_size))
        )
        if hiding is not None:
            hiding.look(last, number, named)
        ranks.average()
        run.sent.append([bucket.traffic.sent_bytes for bucket in ranks.buckets])
        last = measured(ranks, run, rate, sum(run.times(rate)[-2:-1]))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return run


def step_loss(model: nn.Module, ranks: SimulatedRanks, rank: int, batch: Batch) -> float:
    """Forward and backward of a rank's batch."""
    loss = loss_of(model, *batch)
    loss.backward()
    ranks.add(rank)
    return loss.item()


def seconds_of(case: str, seed: int, options: argparse.Namespace) -> dict[str, dict[str, float | None]]:
    """{rate: {method: seconds to the target}} with one seed."""
    given = options.nproc, seed, options.computation
    fixed = {spec: trained(case, spec, *given, rate=1.0) for spec in FIXED}
    target, found = WITHIN * smoothed(fixed[TARGET].losses)[-1], {}
    for text in options.rates:
        rate = parse_rate(text)
        runs = fixed | {spec: trained(case, spec, *given, rate) for spec in options.adaptive}
        found[text] = {spec: run.reaches(target, rate) for spec, run in runs.items()}
    return found


def mean(values: Sequence[float | None]) -> float | None:
    """None where any is: the method does not get there with every seed."""
    return None if None in values else statistics.mean(each for each in values if each is not None)


def rows(options: argparse.Namespace) -> list[dict[str, object]]:
    """A row for each case and rate: mean seconds of each method, and of the adaptive ones how much longer than the best."""
    found: list[dict[str, object]] = []
    for case in options.cases:
        by_seed = [seconds_of(case, seed, options) for seed in options.seeds]
        for rate in options.rates:
            means = {spec: mean([each[rate][spec] for each in by_seed]) for spec in by_seed[0][rate]}
            best, spec = min((means[spec], spec) for spec in FIXED if means[spec] is not None)
            behind = {
                each: None if means[each] is None else 100 * (means[each] / best - 1) for each in options.adaptive
            }
            found.append({"case": case, "rate": rate, "best": spec, "behind_percent": behind, "seconds": means})
            Console().print(found[-1])
    return found


def table(found: Sequence[dict], adaptive: Sequence[str]) -> Table:
    """The rows for a terminal."""
    shown = Table("case", "rate", "best fixed", "its seconds", *(f"{spec}, % longer" for spec in adaptive))
    for row in found:
        behind = [
            "never" if row["behind_percent"][spec] is None else f"{row['behind_percent'][spec]:+.1f}"
            for spec in adaptive
        ]
        shown.add_row(row["case"], row["rate"], row["best"], f"{row['seconds'][row['best']]:.2f}", *behind)
    return shown


def main() -> None:
    """Train, compute, show and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rates", nargs="+", default=["30mbit", "100mbit", "300mbit", "1gbit"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--computation", type=float, default=0.02, help="seconds of a step")
    parser.add_argument("--adaptive", nargs="+", default=["adaptive:budget=2%"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = rows(options)
    Console().print(table(found, options.adaptive))
    if options.json:
        options.json.write_text(json.dumps({**vars(options), "json": None, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
