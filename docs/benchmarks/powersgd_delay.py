"""By how many steps PowerSGD is behind uncompressed training, and what changes that.

    python docs/benchmarks/powersgd_delay.py docs/results/powersgd-delay/runs.json
    python docs/benchmarks/powersgd_delay.py docs/results/powersgd-delay/runs.json --table

A GPT on bytes trains on two simulated ranks with Adam. Each way of WAYS changes the first in one or two respects, and is
compared with `none` under the same change, but with Adam's usual beta1. Runs that the file has are skipped; `--table`
prints a table and runs nothing.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from driver import parser_of
from finished_runs import FinishedRuns
from torch import Tensor

from gradwire.compress import Compressor, compressor
from gradwire.compress.algorithms.dense import Dense
from gradwire.compress.feedback.error_feedback import ErrorFeedback
from gradwire.compress.feedback.partition import Partition
from gradwire.compress.feedback.switch import Switch
from gradwire.experiments.results.statistics import interval
from gradwire.experiments.workloads.data import DataConfig, Dataset, load_dataset
from gradwire.experiments.workloads.evaluation import evaluation_of, held_out_sums
from gradwire.experiments.workloads.models import ModelConfig, build_model
from gradwire.experiments.workloads.simulated import SimulatedRanks
from gradwire.experiments.workloads.training import loss_of

RANKS, CPU = 2, torch.device("cpu")
CONTEXT, HEAD = 64, 32  # bytes of a sequence, width of an attention head
WARMUP = 40  # steps in which the learning rate grows
EVERY, WINDOWS = 25, 256  # steps between validations, and sequences of one
SEEDS = range(3)


@dataclass(frozen=True)
class Way:
    """A compressor, and the training around it."""

    compressor: str = "powersgd:rank=3,payload=int4"  # 1/21 of the width: rank 32 of 768 is 1/24
    apart: str = ""
    """patterns of parameters that are sent uncompressed"""
    until: int = 0
    """first step with the compressor `last`; 0: it never comes"""
    last: str = "none"
    width: int = 64
    layers: int = 2
    tied: bool = False
    """whether the embedding is the head's matrix"""
    batch: int = 16
    """sequences per rank and step"""
    steps: int = 400
    lr: float = 0.005
    beta1: float = 0.9
    beta2: float = 0.95
    schedule: str = "constant"
    first: str = "sent"
    """gradients in Adam's first moment: `sent` is the average that the compressor returns, `exact` the true one"""
    second: str = "sent"
    """gradients in Adam's second moment"""
    age: int = 0
    """steps that averages wait before the optimizer takes them"""
    share: float = 1.0
    """part of an average, and of what was left of those before, that the optimizer takes"""

    @property
    def reference(self) -> "Way":
        """The uncompressed training to compare with, with Adam's usual first beta."""
        names = ("apart", "until", "last", "first", "second", "age", "share", "beta1")
        exact = {name: getattr(BASE, name) for name in names}
        return replace(self, compressor="none", **exact)

    @property
    def changes(self) -> dict[str, Any]:
        """What differs from `BASE`."""
        return {name: value for name, value in asdict(self).items() if value != getattr(BASE, name)}

    def rate(self, step: int) -> float:
        """Return the learning rate of a step: a linear warm-up, then constant, or cosine down to a tenth."""
        part = max(0, step - WARMUP) / (self.steps - WARMUP)
        later = 0.55 + 0.45 * math.cos(math.pi * part) if self.schedule == "cosine" else 1.0
        return self.lr * min(later, (step + 1) / WARMUP)

    def built(self) -> Compressor:
        """Return the compressor."""
        built: Any = compressor(self.compressor)
        if self.until:
            return ErrorFeedback(Switch({0: built.inner, self.until: compressor(self.last)}))
        if self.apart:
            rules = tuple((pattern, Dense()) for pattern in self.apart.split())
            return ErrorFeedback(Partition(rules, built.inner))
        return built


BASE = Way()
RANK_3 = BASE.compressor
RANK_6, RANK_12 = (f"powersgd:rank={rank},payload=int4" for rank in (6, 12))
WAYS = {
    "base": BASE,
    "rank 6": replace(BASE, compressor=RANK_6),
    "rank 12": replace(BASE, compressor=RANK_12),
    "factors in float32": replace(BASE, compressor="powersgd:rank=3"),
    "no error feedback": replace(BASE, compressor=f"{RANK_3},error_feedback=false"),
    "embeddings and head uncompressed": replace(BASE, apart="tokens.* positions.* head.*"),
    "blocks uncompressed": replace(BASE, apart="blocks.*"),
    "a new Q at every step": replace(BASE, compressor=f"{RANK_3},warm_start=false"),
    "two power iterations": replace(BASE, compressor=f"{RANK_3},power_iterations=2"),
    "100 steps of int8 first": replace(BASE, compressor=f"{RANK_3},start_iter=100,warmup=int8"),
    "100 steps of int8 last": replace(BASE, until=300, last="int8"),
    "beta1 0, 100 steps of int8 last": replace(BASE, until=300, last="int8", beta1=0.0),
    "uncompressed from step 300": replace(BASE, until=300),
    "batch x 0.25": replace(BASE, batch=BASE.batch // 4),
    "twice the steps": replace(BASE, steps=2 * BASE.steps),
    "twice the width and rank": replace(BASE, width=2 * BASE.width, compressor=RANK_6),
    "twice the width and rank, beta1 0": replace(BASE, width=2 * BASE.width, compressor=RANK_6, beta1=0.0),
    "embedding tied to the head": replace(BASE, tied=True),
    "second moment of exact gradients": replace(BASE, second="exact"),
    "first moment of exact gradients": replace(BASE, first="exact"),
    "beta2 0.999": replace(BASE, beta2=0.999),
    "beta1 0.5": replace(BASE, beta1=0.5),
    "beta1 0.5, rank 6": replace(BASE, compressor=RANK_6, beta1=0.5),
    "beta1 0": replace(BASE, beta1=0.0),
    "beta1 0, rank 6": replace(BASE, compressor=RANK_6, beta1=0.0),
    "beta1 0, lr x 0.5": replace(BASE, beta1=0.0, lr=BASE.lr / 2),
    "beta1 0, lr x 2": replace(BASE, beta1=0.0, lr=BASE.lr * 2),
    "lr x 0.5": replace(BASE, lr=BASE.lr / 2),
    "lr x 2": replace(BASE, lr=BASE.lr * 2),
    "none, beta1 0.5": replace(BASE, compressor="none", beta1=0.5),
    "none, beta1 0": replace(BASE, compressor="none", beta1=0.0),
    "none, lr x 4": replace(BASE, compressor="none", lr=BASE.lr * 4),
    "cosine": replace(BASE, schedule="cosine"),
    "cosine, lr x 2": replace(BASE, schedule="cosine", lr=BASE.lr * 2),
    "cosine, beta1 0": replace(BASE, schedule="cosine", beta1=0.0),
    "cosine, beta1 0, lr x 2": replace(BASE, schedule="cosine", beta1=0.0, lr=BASE.lr * 2),
    "cosine, beta1 0, rank 6": replace(BASE, schedule="cosine", beta1=0.0, compressor=RANK_6),
    "none, a quarter of average and rest": replace(BASE, compressor="none", share=0.25),
    "the same, lr x 0.5": replace(BASE, compressor="none", share=0.25, lr=BASE.lr / 2),
    "none, gradients of 8 steps ago": replace(BASE, compressor="none", age=8),
}


class Adam:
    """Adam without weight decay on flat parameters, whose two moments may see different gradients."""

    def __init__(self, way: Way, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.way, self.parameters, self.done = way, parameters, 0
        self.sizes = [each.numel() for each in parameters]
        self.mean, self.square = torch.zeros(sum(self.sizes)), torch.zeros(sum(self.sizes))

    @torch.no_grad()
    def step(self, first: Tensor, second: Tensor) -> None:
        """Update the parameters."""
        way, self.done = self.way, self.done + 1
        self.mean.lerp_(first, 1 - way.beta1)
        self.square.lerp_(second.square(), 1 - way.beta2)
        mean, square = self.mean / (1 - way.beta1**self.done), self.square / (1 - way.beta2**self.done)
        update = mean / (square.sqrt() + 1e-8)
        for parameter, part in zip(self.parameters, update.split(self.sizes), strict=True):
            parameter.sub_(part.view_as(parameter), alpha=way.rate(self.done - 1))


class Late:
    """The averages that reach the optimizer: those of the compressor, or later ones. `held` is the exact ones that did not.

    `seen` has for each step the norm of `held` over that of the exact average, and the share of the squared norm of
    both together that was sent.
    """

    def __init__(self, way: Way, elements: int) -> None:
        self.way, self.seen = way, []
        self.waiting = [torch.zeros(elements) for _ in range(way.age)]
        self.held, self.left = torch.zeros(elements), torch.zeros(elements)

    def step(self, exact: Tensor, average: Tensor) -> Tensor:
        """Return what the optimizer takes at this step."""
        self.waiting.append(average)
        average = self.waiting.pop(0)
        sent = self.way.share * (self.left + average)
        self.left += average - sent
        self.held += exact
        wanted = float(self.held.square().sum())
        self.held -= sent
        self.seen.append((float(self.held.norm() / exact.norm()), 1 - float(self.held.square().sum()) / wanted))
        return sent


def clipped(flat: Tensor) -> Tensor:
    """Return a gradient with a norm of at most 1."""
    return flat * min(1.0, 1 / (float(flat.norm()) + 1e-6))


def trained(way: Way, seed: int, dataset: Dataset) -> dict[str, Any]:
    """Train in one way. Return bytes, and every `EVERY` steps the validation loss and the means of `Late.seen`."""
    sizes = ModelConfig("gpt", width=way.width, layers=way.layers, heads=way.width // HEAD, context=CONTEXT)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = build_model(sizes, dataset)
    if way.tied:
        model.tokens.weight = model.head.weight
    ranks = SimulatedRanks(model, way.built(), RANKS, bucket_mb=25)
    adam, late = Adam(way, ranks.parameters), Late(way, ranks.elements)
    batches = [dataset.train_batches(way.batch, seed=seed, rank=rank, world_size=RANKS) for rank in range(RANKS)]
    losses, watched = [], []
    for step in range(1, way.steps + 1):
        for rank in range(RANKS):
            ranks.begin(rank)
            loss_of(model, *next(batches[rank])).backward()
        exact = torch.stack(ranks.gradients).mean(0)
        ranks.average()
        sent = late.step(exact, torch.cat([each.grad.reshape(-1) for each in ranks.parameters]))
        given = {"exact": clipped(exact), "sent": clipped(sent)}
        adam.step(given[way.first], given[way.second])
        if step % EVERY == 0:
            found = evaluation_of(held_out_sums(model, dataset.evaluation_batches(32, WINDOWS // 32), CPU))
            losses.append(round(found.loss, 5))
            held, taken = (statistics.fmean(each) for each in zip(*late.seen[-EVERY:], strict=True))
            watched.append({"held": round(held, 4), "taken": round(taken, 4)})
    return {"losses": losses, "sent_bytes": ranks.total.sent_bytes, "watched": watched}


def behind(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return after each validation by how many steps a training is behind another, whose losses are interpolated.

    NaN where the other had this loss before its first validation, or not within its steps.
    """
    found = []
    for index, loss in enumerate(losses, 1):
        above = [place for place, other in enumerate(reference) if other > loss]
        if not above or above[-1] + 1 == len(reference):
            found.append(math.nan)
            continue
        high, low = reference[above[-1]], reference[above[-1] + 1]
        found.append(EVERY * (index - (above[-1] + 1 + (high - loss) / (high - low))))
    return found


def shown(values: Sequence[float], digits: int = 0) -> str:
    """Return the mean of a figure of each seed, with its 95 % interval; a dash where a seed has none."""
    if any(map(math.isnan, values)):
        return "-"
    spread = f" ± {interval(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def line(name: str, runs: Sequence[Any], others: Sequence[Any], best: Sequence[Any]) -> str:
    """Return a way's line of the table: its runs by seed, those of its reference, and of the best uncompressed way."""
    late = [behind(run["losses"], other["losses"]) for run, other in zip(runs, others, strict=True)]
    pairs = zip(runs, best, strict=True)
    tuned = [behind(run["losses"], other["losses"])[-1] if other else math.nan for run, other in pairs]
    ends = [[each["losses"][-1] if each else math.nan for each in several] for several in (runs, others, best)]
    over, above_best = (
        [100 * (mine / theirs - 1) for mine, theirs in zip(ends[0], each, strict=True)] for each in ends[1:]
    )
    held, taken = (statistics.fmean(row[key] for run in runs for row in run["watched"]) for key in ("held", "taken"))
    cells = [
        f"{name} ({len(runs)})",
        f"{others[0]['sent_bytes'] / runs[0]['sent_bytes']:.0f}x",
        f"{statistics.fmean(ends[1]):.3f}",
        shown(over, 1),
        shown(above_best, 1),
        *(shown([each[len(each) * quarter // 4 - 1] for each in late]) for quarter in (1, 2, 3, 4)),
        shown(tuned),
        f"{held:.1f}",
        f"{taken:.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def table(finished: FinishedRuns) -> Iterator[str]:
    """Yield the lines of a table, one for each way that has run."""
    places = "behind at 1/4 | 1/2 | 3/4 | end | behind best"
    yield f"| way (seeds) | bytes | `none` | above it, % | above best, % | {places} | held | sent |"
    yield "|---" * 12 + "|"
    for name, way in WAYS.items():
        best = replace(way.reference, lr=2 * BASE.lr, beta2=BASE.beta2, batch=BASE.batch)
        ways = [each.changes for each in (way, way.reference, best)]
        found = [[finished.find({"way": each, "seed": seed}) for each in ways] for seed in SEEDS]
        complete = [each for each in found if None not in each[:2]]
        if complete:
            yield line(name, *zip(*complete, strict=True))


def main() -> None:
    """Run all that the file lacks."""
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help=f"{[*SEEDS]} are in the table")
    parser.add_argument("--table", action="store_true", help="print the table of the file's runs, and run nothing")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    finished = FinishedRuns(asked.file)
    if asked.table:
        print(*table(finished), sep="\n")
        return
    dataset = load_dataset(DataConfig(), ModelConfig("gpt", context=CONTEXT))
    for seed, name in product(asked.seeds, asked.ways):
        way = WAYS[name]
        for each in (way.reference, way):
            for run in finished.missing([{"way": each.changes, "seed": seed}]):
                finished.add(run, **trained(each, seed, dataset))


if __name__ == "__main__":
    main()
