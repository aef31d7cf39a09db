"""Validation losses of ways to spend the bytes of PowerSGD: ranks by phase and by parameter, and sparse codes.

    python docs/benchmarks/low_rank_choices.py docs/results/loss/low-rank.json
    python docs/benchmarks/low_rank_choices.py docs/results/loss/low-rank.json --table

The task is the GPT of the study in docs/results/quality-long, on four simulated ranks, with a warm-up of 60 steps. All
choices of ranks send as many bytes, to 8 per cent; ranks by spectrum send up to 20 per cent more. Runs
that the file has are skipped. `--table` writes a table beside the file, and runs nothing.
"""

import csv
import json
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from compressor_loss import RANKS, Task, trained
from driver import parser_of
from finished_runs import FinishedRuns
from torch import Tensor

from gradwire.compress import Compressor, compressor
from gradwire.compress.algorithms.adapters import Gathered
from gradwire.compress.algorithms.dense import Dense
from gradwire.compress.algorithms.powersgd import PowerSGD
from gradwire.compress.algorithms.topk import TopK
from gradwire.compress.feedback.error_feedback import ErrorFeedback
from gradwire.compress.feedback.partition import Partition
from gradwire.compress.feedback.switch import Switch
from gradwire.experiments.results.statistics import interval
from gradwire.experiments.workloads.data import Dataset, load_dataset
from gradwire.experiments.workloads.models import ModelConfig
from gradwire.experiments.workloads.optimizers import schedule_for
from gradwire.experiments.workloads.training import initial_model, loss_of
from gradwire.kernels import Residual

TASK = Task(ModelConfig("gpt", layers=2, context=64), "adamw", 0.003, 30, 400)
START, RANK = 60, 6  # steps without compression; the rank that all choices of a group have to beat
MIDDLE = (START + TASK.steps) // 2
SAMPLED = 8  # steps before START whose mean gradient shows the spectrum
EDGES = ("tokens.*", "positions.*", "head.*")  # embeddings and the head
BITS_OF_SPARSE = 14, 64  # of an element and its place, packed and as `topk` sends them
CHUNK = 64  # elements of a cosine transform


def factors(rank: int) -> PowerSGD:
    """Return PowerSGD in 4 bits."""
    return PowerSGD(rank, payload="int4")


def late(stages: Mapping[int, Compressor]) -> Compressor:
    """Return stages behind the uncompressed warm-up, with error feedback around."""
    return ErrorFeedback(Switch({0: Dense(), **stages}))


def by_name(ranks: Mapping[str, int], otherwise: int) -> Compressor:
    """Return PowerSGD with a rank by the pattern of a parameter's name."""
    rules = tuple((pattern, factors(rank)) for pattern, rank in ranks.items())
    return late({START: Partition(rules, factors(otherwise))})


@dataclass(frozen=True)
class OfSenders(TopK):
    """Top-k whose average at an element is over the ranks that have sent it, as DeMo's code averages."""

    def decode(self, rows: Tensor, out: Tensor, length: int, residual: Tensor | None = None) -> None:
        """Write the mean over senders, zero where no one sent."""
        super().decode(rows, out, length, residual)
        places = self._parts(rows, length)[0].long().view(-1)
        senders = torch.zeros(length).index_add_(0, places, torch.ones(len(places))).clamp(min=1)
        out.mul_(len(rows) / senders[: out.numel()])


def cosines(flat: Tensor, *, back: bool = False) -> Tensor:
    """Return the orthonormal cosine transform of each chunk, or its inverse; zeros pad the last chunk."""
    steps = torch.arange(CHUNK, dtype=torch.float64)
    waves = torch.cos(math.pi / CHUNK * (steps + 0.5) * steps.unsqueeze(1)) * (2 / CHUNK) ** 0.5
    waves[0] /= 2**0.5
    waves = waves.to(flat.dtype)
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % CHUNK)).view(-1, CHUNK)
    return (padded @ (waves if back else waves.mT)).view(-1)


@dataclass(frozen=True)
class OfCosines(TopK):
    """Top-k of a chunked cosine transform: DeMo's idea, in one dimension."""

    def row_length(self, numel: int) -> int:
        """Return whole chunks."""
        return numel + -numel % CHUNK

    def encode(self, grad: Tensor, residual: Residual | None, rows: Tensor, length: int) -> None:
        """Write the largest coefficients; `residual` keeps the rest."""
        coefficients = cosines(grad if residual is None else residual.plus(grad))
        super().encode(coefficients, None, rows, length)
        coefficients[self._parts(rows, length)[0].long().view(-1)] = 0
        if residual is not None:
            residual.after.copy_(cosines(coefficients, back=True)[: grad.numel()])

    def decode(self, rows: Tensor, out: Tensor, length: int, residual: Tensor | None = None) -> None:
        """Write the mean over voters."""
        wide = torch.zeros(length)
        super().decode(rows, wide, length)
        out.copy_(cosines(wide, back=True)[: out.numel()])


def mean_gradients(dataset: Dataset, seed: int) -> dict[str, Tensor]:
    """Return the mean gradients of the last steps before `START`, of an uncompressed training with one rank."""
    config = TASK.config(seed)
    model = initial_model(config, dataset, torch.device("cpu"))
    [optimizer] = TASK.optimizers(model)
    schedule = schedule_for(optimizer, "cosine", TASK.warmup, TASK.steps)
    batches = dataset.train_batches(TASK.batch_size * RANKS, seed=seed, rank=0, world_size=1)
    found = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    for step in range(START):
        loss_of(model, *next(batches)).backward()
        for name, parameter in model.named_parameters():
            if step >= START - SAMPLED and parameter.grad is not None:
                found[name] += parameter.grad / SAMPLED
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return found


def by_spectrum(gradients: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the rank of each matrix, so that they have as many columns as with the same `RANK`, and lose least.

    The next singular vectors go to the matrix that loses most of its squared norm per byte. Each has at least one.
    """
    matrices = {name: each for name, each in gradients.items() if each.dim() > 1}
    shares = {name: torch.linalg.svdvals(each).square() / each.square().sum() for name, each in matrices.items()}
    ranks = dict.fromkeys(matrices, 1)
    left = (RANK - 1) * sum(sum(each.shape) for each in matrices.values())
    while True:
        gains = {
            name: float(shares[name][rank]) / sum(matrices[name].shape)
            for name, rank in ranks.items()
            if sum(matrices[name].shape) <= left and 2 * (rank + 1) * sum(matrices[name].shape) < matrices[name].numel()
        }
        if not gains:
            return ranks
        chosen = max(gains, key=lambda name: gains[name])
        ranks[chosen] += 1
        left -= sum(matrices[chosen].shape)


def with_codec(spec: str, codec: type[TopK]) -> Compressor:
    """Return a `topk` compressor with another codec."""

    def changed(built: Any) -> Any:
        if isinstance(built, Gathered):
            return replace(built, codec=codec(**vars(built.codec)))
        return replace(built, inner=changed(built.inner))

    return changed(compressor(spec))


def choices(dataset: Dataset, seed: int) -> dict[str, str | Compressor]:
    """Return all compressors by name."""
    low, high = RANK // 2, RANK + RANK // 2
    wider = BITS_OF_SPARSE[1] / BITS_OF_SPARSE[0]
    packed = [f"topk:ratio={share * wider:.4g},error_feedback=0.9" for share in (0.01, 0.0025)]
    return {
        "none": "none",
        f"rank {RANK}": late({START: factors(RANK)}),
        f"rank {high}, then {low}": late({START: factors(high), MIDDLE: factors(low)}),
        f"rank {low}, then {high}": late({START: factors(low), MIDDLE: factors(high)}),
        "rank 10 for embeddings and head, else 5": by_name(dict.fromkeys(EDGES, 10), 5),
        "rank 2 for embeddings and head, else 7": by_name(dict.fromkeys(EDGES, 2), 7),
        "ranks by spectrum": by_name(by_spectrum(mean_gradients(dataset, seed)), 1),
        "powersgd:rank=8,payload=int8,start_iter=60": "powersgd:rank=8,payload=int8,start_iter=60",
        **{each: each for each in packed},
        **{f"{each}, average of senders": with_codec(each, OfSenders) for each in packed},
        **{f"{each}, of cosines": with_codec(each, OfCosines) for each in packed},
    }


def table(file: Path) -> Iterator[list[str]]:
    """Yield the head and the rows of a table of all choices: bytes of a compressed step and in all, and losses."""
    runs = json.loads(file.read_text())["runs"]
    base = {run["seed"]: run for run in runs if run["choice"] == "none"}
    step = base[0]["sent_bytes"] / TASK.steps
    yield ["way", "fewer bytes per compressed step", "in all", "loss above none, %"]
    for name in dict.fromkeys(run["choice"] for run in runs if run["choice"] != "none"):
        own = [run for run in runs if run["choice"] == name]
        above = [100 * (run["loss"] / base[run["seed"]]["loss"] - 1) for run in own]
        packed = BITS_OF_SPARSE[0] / BITS_OF_SPARSE[1] if name.startswith("topk") else 1.0
        cold = 0 if name.startswith("topk") else START
        sent = [run["sent_bytes"] * packed for run in own]
        late = {f"{step * (TASK.steps - cold) / (each - cold * step):.0f}x" for each in sent}
        whole = {f"{step * TASK.steps / each:.{int(step * TASK.steps / each < 9.95)}f}x" for each in sent}
        loss = f"{statistics.fmean(above):+.1f} ± {interval(above):.1f}"
        yield [name, " to ".join(sorted(late)), " to ".join(sorted(whole)), loss]


def main() -> None:
    """Run all that the file lacks."""
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path, help="of the results, which grows by a run at a time")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="write the table of the file's runs, and run nothing")
    asked = parser.parse_args()
    if asked.table:
        with asked.file.with_suffix(".csv").open("w", encoding="utf-8") as rows:
            csv.writer(rows, lineterminator="\n").writerows(table(asked.file))
        return
    torch.set_num_threads(1)
    finished, dataset = FinishedRuns(asked.file), load_dataset(TASK.data, TASK.model)
    for seed in range(asked.seeds):
        built = choices(dataset, seed)
        for run in finished.missing({"choice": name, "seed": seed} for name in built):
            found = trained(built[run["choice"]], TASK, seed, dataset)
            finished.add(run, sent_bytes=found["sent_bytes"], loss=found["loss"])


if __name__ == "__main__":
    main()
