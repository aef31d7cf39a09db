"""Validation losses of the compressors of the decision table, with the optimizers of its columns.

    python docs/benchmarks/compressor_loss.py losses.json --tasks gpt-muon --compressors none int4 --seeds 0

The tasks are those of the study in docs/results/quality, on four simulated ranks. Every compressor has the error feedback
that `attach(..., optimizer=optimizer)` gives it, and compresses from the first step. Runs that the file has are skipped.
"""

import argparse
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from driver import parser_of
from finished_runs import FinishedRuns
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from gradwire.compress import Compressor, compressor, specification, tuned
from gradwire.experiments.advice.candidates import CANDIDATES
from gradwire.experiments.compare.config import CompareConfig
from gradwire.experiments.workloads.data import DataConfig, Dataset, load_dataset
from gradwire.experiments.workloads.evaluation import evaluation_of, held_out_sums
from gradwire.experiments.workloads.models import ModelConfig
from gradwire.experiments.workloads.optimizers import schedule_for
from gradwire.experiments.workloads.simulated import SimulatedRanks
from gradwire.experiments.workloads.training import initial_model, loss_of

RANKS, EVAL_BATCHES, CPU = 4, 128, torch.device("cpu")
MUON_LR = 0.03  # of the blocks' matrices


@dataclass(frozen=True)
class Task:
    """A model, its data and its optimizer, with the settings of the study."""

    model: ModelConfig
    optimizer: str
    lr: float
    warmup: int
    steps: int
    batch_size: int = 4
    data: DataConfig = field(default_factory=DataConfig)
    bucket_mb: float = 25

    def config(self, seed: int) -> CompareConfig:
        """Return the training of one seed."""
        return CompareConfig(
            simulated=True,
            model=self.model,
            data=self.data,
            steps=self.steps,
            batch_size=self.batch_size,
            warmup=self.warmup,
            schedule="cosine",
            seed=seed,
            bucket_mb=self.bucket_mb,
        )

    def optimizers(self, model: nn.Module) -> list[Optimizer]:
        """Return the optimizers of a model: with Muon, AdamW beside it."""
        if self.optimizer == "sgd":
            return [SGD(model.parameters(), self.lr, momentum=0.9)]
        matrices = [p for p in model.blocks.parameters() if p.dim() > 1] if self.optimizer == "muon" else []
        others = [p for p in model.parameters() if all(p is not each for each in matrices)]
        muon = [torch.optim.Muon(matrices, MUON_LR)] if matrices else []
        return [*muon, AdamW(others, self.lr)]


GPT = ModelConfig("gpt", width=64, layers=2, heads=2, context=64)
LSTM = ModelConfig("lstm", width=96, layers=1, vocabulary=256, context=64)
RESNET = ModelConfig("resnet18-cifar", width=8, layers=1)
TASKS = {
    "gpt-adamw": Task(GPT, "adamw", 0.01, 12, 120),
    "gpt-muon": Task(GPT, "muon", 0.01, 12, 120),
    "resnet-sgd": Task(RESNET, "sgd", 0.05, 8, 80, batch_size=16, data=DataConfig("patterns")),
    "lstm-sgd": Task(LSTM, "sgd", 2.0, 15, 150),
}
LONGER = {
    "gpt-adamw-400": Task(GPT, "adamw", 0.01, 30, 400),
    "gpt-muon-400": Task(GPT, "muon", 0.01, 30, 400),
    "gpt-adamw-400-buckets": Task(GPT, "adamw", 0.01, 30, 400, bucket_mb=0.05),
    "gpt-muon-400-buckets": Task(GPT, "muon", 0.01, 30, 400, bucket_mb=0.05),
    **{
        f"gpt-{optimizer}-0.9m": Task(replace(GPT, width=128, layers=4, heads=4), optimizer, 0.006, 30, 400)
        for optimizer in ("muon", "adamw")
    },
}


def trained(spec: str | Compressor, task: Task, seed: int, dataset: Dataset) -> dict[str, Any]:
    """Train with one compressor. Return it with its feedback, the bytes that a rank sent, and the validation loss."""
    config = task.config(seed)
    model = initial_model(config, dataset, CPU)
    optimizers = task.optimizers(model)
    built = compressor(tuned(spec, optimizers) if isinstance(spec, str) else spec)
    ranks = SimulatedRanks(model, built, RANKS, config.bucket_mb)
    schedules = [schedule_for(each, "cosine", task.warmup, task.steps) for each in optimizers]
    batches = [dataset.train_batches(task.batch_size, seed=seed, rank=rank, world_size=RANKS) for rank in range(RANKS)]
    for _ in range(task.steps):
        before = [buffer.clone() for buffer in model.buffers()]
        for rank in reversed(range(RANKS)):  # rank 0 comes last: its buffers stay
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
            ranks.begin(rank)
            loss_of(model, *next(batches[rank])).backward()
        ranks.average()
        for each in (*optimizers, *schedules):
            each.step()
    loss = evaluation_of(held_out_sums(model, dataset.evaluation_batches(task.batch_size, EVAL_BATCHES), CPU)).loss
    return {"tuned": specification(built), "sent_bytes": ranks.total.sent_bytes, "loss": round(loss, 6)}


def options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path, help="of the results, which grows by a run at a time")
    parser.add_argument("--tasks", default=",".join(TASKS), help=f"of {', '.join(TASKS | LONGER)}")
    parser.add_argument("--compressors", nargs="+", default=[each.spec for each in CANDIDATES])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    return parser.parse_args()


def main() -> None:
    """Run all that the file lacks."""
    asked = options()
    torch.set_num_threads(1)
    finished = FinishedRuns(asked.file)
    for seed, name in product(asked.seeds, asked.tasks.split(",")):
        task = (TASKS | LONGER)[name]
        dataset = load_dataset(task.data, task.model)
        for run in finished.missing({"task": name, "compressor": spec, "seed": seed} for spec in asked.compressors):
            finished.add(run, **trained(run["compressor"], task, seed, dataset))


if __name__ == "__main__":
    main()
