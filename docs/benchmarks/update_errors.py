"""How far compressed averages turn an optimizer's updates, step by step along one uncompressed training.

    python docs/benchmarks/update_errors.py --seeds 0
    python docs/benchmarks/update_errors.py --table

The training is `gpt-muon` of few_bits.py: Muon for the blocks' matrices, AdamW for the rest. Each compressor gets the
gradients of its four ranks, and its average goes into moments of its own. "Error" is the norm of the difference to the
update of exact averages over the norm of that, in the mean of the last 20 of 40 steps; "drift" is the same of sums of
updates over all steps, each times its learning rate. Runs that the file has are skipped; `--table` prints a table and runs
nothing.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from driver import parser_of
from few_bits import CORE, EMBEDDINGS, HEAD, MATRICES, ROOT, SEEDS, TASKS, VECTORS, Way, sent_per_step
from finished_runs import FinishedRuns
from torch import Tensor

from gradwire.compress import Compressor, Layout, Simulation, compressor
from gradwire.experiments.results.statistics import interval
from gradwire.experiments.workloads.data import Dataset, load_dataset
from gradwire.experiments.workloads.muon import orthonormalized
from gradwire.experiments.workloads.optimizers import schedule_for
from gradwire.experiments.workloads.simulated import SimulatedRanks
from gradwire.experiments.workloads.training import CPU, initial_model, loss_of

FILE = ROOT / "docs" / "results" / "few-bits-muon" / "update-errors.json"
GROUPS = {"matrices": MATRICES, "vectors": VECTORS, "embeddings": EMBEDDINGS, "head": HEAD}
MOMENTUM, BETAS = 0.95, (0.9, 0.999)  # of Muon and of Adam
TASK, STEPS, RANKS = TASKS["gpt-muon"], 40, 4  # the first third of its steps
WAYS = {name: way for name, way in CORE.items() if "uncompressed" not in name and not callable(way)}


class Updates:
    """The updates of Muon and Adam by the averages of one compressor, with moments of their own."""

    def __init__(self, way: Way, layout: Layout) -> None:
        self.layout, self.steps = layout, 0
        self.ranks = Simulation(compressor(way) if isinstance(way, str | Compressor) else way, layout)
        self.momentum, self.first, self.second = (torch.zeros(layout.numel) for _ in range(3))

    def step(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the update of each parameter from the gradients of each rank."""
        average, self.steps = self.ranks.step(gradients)[0], self.steps + 1
        self.momentum.lerp_(average, 1 - MOMENTUM)
        self.first.lerp_(average, 1 - BETAS[0])
        self.second.lerp_(average.square(), 1 - BETAS[1])
        mean, square = (
            each / (1 - beta**self.steps) for each, beta in zip((self.first, self.second), BETAS, strict=True)
        )
        muon, adam = (
            self.layout.views(each) for each in (average.lerp(self.momentum, MOMENTUM), mean / (square.sqrt() + 1e-8))
        )
        return {name: orthonormalized(muon[name]) if group_of(name) == "matrices" else adam[name] for name in muon}


def group_of(name: str) -> str:
    """Return the group of a parameter."""
    return next(group for group, patterns in GROUPS.items() if any(fnmatchcase(name, each) for each in patterns))


class Compared:
    """Sums over steps of updates, and of their differences to exact ones, by group of parameters."""

    def __init__(self) -> None:
        self.errors: dict[str, list[float]] = {group: [] for group in GROUPS}
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, exact: Mapping[str, Tensor], found: Mapping[str, Tensor], rate: float) -> None:
        """Take in the updates of a step with a learning rate."""
        squares = {group: [0.0, 0.0] for group in GROUPS}
        for name, update in exact.items():
            pair = (found[name] - update, update)
            old = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = tuple(total + rate * each for total, each in zip(old, pair, strict=True))
            for place, each in enumerate(pair):
                squares[group_of(name)][place] += float(each.square().sum())
        for group, (error, whole) in squares.items():
            self.errors[group].append((error / whole) ** 0.5)

    def result(self) -> dict[str, Any]:
        """Return the error and the drift of each group."""
        found = {}
        for group, errors in self.errors.items():
            pairs = [pair for name, pair in self.sums.items() if group_of(name) == group]
            error, whole = (sum(float(pair[place].square().sum()) for pair in pairs) for place in (0, 1))
            later = statistics.fmean(errors[len(errors) // 2 :])
            found[group] = {"error": round(later, 4), "drift": round((error / whole) ** 0.5, 4)}
        return found


def followed(ways: Sequence[str], seed: int, dataset: Dataset, steps: int = STEPS) -> dict[str, dict[str, Any]]:
    """Return for each way how far its updates are from exact ones along an uncompressed training."""
    model = initial_model(TASK.config(seed), dataset, CPU)
    optimizers = TASK.optimizers(model)
    schedules = [schedule_for(each, "cosine", TASK.warmup, TASK.steps) for each in optimizers]
    ranks = SimulatedRanks(model, compressor("none"), RANKS, bucket_mb=25)
    (bucket,) = ranks.buckets
    updates = {way: Updates(WAYS[way], bucket.layouts[0]) for way in ("none", *ways)}
    compared = {way: Compared() for way in ways}
    batches = [dataset.train_batches(TASK.batch_size, seed=seed, rank=rank, world_size=RANKS) for rank in range(RANKS)]
    for _ in range(steps):
        for rank in range(RANKS):
            ranks.begin(rank)
            loss_of(model, *next(batches[rank])).backward()
        with torch.no_grad():
            found = {way: each.step(ranks.gradients) for way, each in updates.items()}
            for way in ways:
                compared[way].add(found["none"], found[way], schedules[0].get_last_lr()[0])
        ranks.average()
        for each in (*optimizers, *schedules):
            each.step()
    return {way: each.result() for way, each in compared.items()}


def table(finished: FinishedRuns) -> Iterator[str]:
    """Yield the lines of a table: for each way its bytes and for each group its error and drift in per cent."""
    yield f"| compressor | bytes, 0.14 M | bytes, 11 M | {' | '.join(f'{group}: error, drift' for group in GROUPS)} |"
    yield "|---" * (3 + len(GROUPS)) + "|"
    for way in WAYS:
        runs = [run for seed in range(9) if (run := finished.find({"way": way, "seed": seed}))]
        if runs:
            fewer = [sent_per_step("none", size) / sent_per_step(WAYS[way], size) for size in ("0.14 M", "11 M")]
            cells = [
                ", ".join(per_cent([run[group][key] for run in runs]) for key in ("error", "drift")) for group in GROUPS
            ]
            yield f"| {way} | {' | '.join([*(f'{each:.1f}x' for each in fewer), *cells])} |"


def per_cent(values: Sequence[float]) -> str:
    """Return the mean of parts in per cent, and its 95 % interval where there are several seeds."""
    spread = f" ± {100 * interval(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{spread}"


def main() -> None:
    """Run all that the file lacks."""
    parser = parser_of(__doc__)
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, metavar="WAY", default=[way for way in WAYS if way != "none"]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[*SEEDS])
    parser.add_argument("--table", action="store_true", help="print the table of the finished runs, and run nothing")
    asked = parser.parse_args()
    finished = FinishedRuns(asked.file)
    if asked.table:
        print(*table(finished), sep="\n")
        return
    torch.set_num_threads(1)
    dataset = load_dataset(TASK.data, TASK.model)
    for seed in asked.seeds:
        missing = [*finished.missing({"way": way, "seed": seed} for way in asked.ways)]
        found = followed([run["way"] for run in missing], seed, dataset) if missing else {}
        for run in missing:
            finished.add(run, **found[run["way"]])


if __name__ == "__main__":
    main()
