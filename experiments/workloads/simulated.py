"""A training whose ranks are simulated: one model, the ranks' batches in turn, averages by their programs in lock step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ...compress import Compressor, Ranks, Simulation, Traffic, compressor, warm_up_steps
from ...hooks.plan import bucket_layouts, ratio
from ..results.comparison import RunResult, Seconds
from ..results.statistics import percentiles
from .data import Dataset
from .evaluation import digest_of, evaluation_of, held_out_sums
from .history import History
from .memory import peak_memory, reset_peak_memory
from .optimizers import optimizers_for, schedule_for
from .sample import Batch
from .training import REPORT_EVERY, Report, TrainingConfig, initial_model, loss_of, steady

CPU = torch.device("cpu")


class SimulatedRanks:
    """The gradients of several ranks for one model, in DDP's first buckets, and a compressor's state for each of them.

    Each rank's gradients are added with `add`; `average` puts their averages into the model's gradients.
    """

    def __init__(self, model: nn.Module, built: Compressor, world_size: int, bucket_mb: float | None) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        last_first = dict(reversed(self.parameters.items()))
        layouts = bucket_layouts(last_first, bucket_mb, Ranks(world_size), CPU)
        self.buckets = [Simulation(built, layout) for layout in layouts]
        self.gradients = [[torch.zeros(layout.numel) for _ in range(world_size)] for layout in layouts]
        self.elements = sum(p.numel() for p in self.parameters.values())
        self.last, self.total = Traffic(), Traffic()

    def add(self, rank: int) -> None:
        """Move the model's gradients into what this rank has of the step."""
        for bucket, flats in zip(self.buckets, self.gradients, strict=True):
            for name, view in bucket.layouts[0].views(flats[rank]).items():
                if (grad := self.parameters[name].grad) is not None:
                    view.add_(grad)
        self._clear()

    def average(self) -> None:
        """The averages of the step as the model's gradients; what the ranks had begins anew."""
        self.last = Traffic()
        for bucket, flats in zip(self.buckets, self.gradients, strict=True):
            views = bucket.layouts[0].views(bucket.step(flats)[0])
            for name, view in views.items():
                self.parameters[name].grad = view.clone()
            for flat in flats:
                flat.zero_()
            self.last += bucket.traffic
        self.total += self.last

    def _clear(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None


def train_simulated(spec: str, config: TrainingConfig, dataset: Dataset, world_size: int, report: Report) -> RunResult:
    """What `train` does on so many ranks, in this process alone: losses and bytes are theirs to round-off.

    Buffers, such as running statistics, are rank 0's. Seconds are CPU seconds of one rank: a step is the slowest rank's
    forward and backward, a rank's share of the programs (told as `encode`) and the optimizer; no network is part of it.
    """
    reset_peak_memory(CPU)
    built = compressor(spec)
    model = initial_model(config, dataset, CPU)
    ranks = SimulatedRanks(model, built, world_size, config.bucket_mb)
    history = History()
    averaging = _steps(model, spec, ranks, config, dataset, world_size, history, report)
    batches = dataset.evaluation_batches(config.batch_size, config.eval_batches)
    return RunResult(
        compressor=spec,
        steps=config.steps,
        loss=tuple(history.losses),
        eval=evaluation_of(held_out_sums(model, batches, CPU)),
        step_seconds=percentiles(steady(history.step_seconds)),
        seconds=Seconds(encode=averaging / config.optimizer_steps, wait=0.0, decode=0.0),
        payload_bytes_per_step=ranks.last.payload_bytes,
        sent_bytes_per_step=ranks.last.sent_bytes,
        compression_ratio=ratio(ranks.elements, ranks.last, world_size),
        peak_memory_bytes=peak_memory(CPU),
        train_seconds=tuple(history.train_seconds),
        parameters_digest=digest_of(model),
        warmed_up=warm_up_steps(built) < config.optimizer_steps,
        total_sent_bytes=ranks.total.sent_bytes,
    )


def _steps(
    model: nn.Module,
    spec: str,
    ranks: SimulatedRanks,
    config: TrainingConfig,
    dataset: Dataset,
    world_size: int,
    history: History,
    report: Report,
) -> float:
    """Train; the seconds that a rank spent in its programs."""
    optimizers = optimizers_for(model, spec, config.optimizer, config.lr, config.momentum)
    schedules = [schedule_for(each, config.schedule, config.warmup, config.optimizer_steps) for each in optimizers]
    batches = [
        dataset.train_batches(config.batch_size, seed=config.seed, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    averaging = 0.0
    for step in range(config.steps):
        loss, seconds = _gradients(model, ranks, batches, config.sync_every)
        if (step + 1) % config.sync_every == 0:
            start = time.process_time()
            ranks.average()
            share = (time.process_time() - start) / world_size
            start = time.process_time()
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            seconds += share + time.process_time() - start
            averaging += share
        history.add(loss, seconds)
        if (step + 1) % REPORT_EVERY == 0 or step + 1 == config.steps:
            report(history.look_at(history.losses[len(history.mean_losses) :]))
    return averaging


def _gradients(
    model: nn.Module, ranks: SimulatedRanks, batches: Sequence[Iterator[Batch]], sync_every: int
) -> tuple[float, float]:
    """Forward and backward of one batch a rank: their mean loss, and the seconds of the slowest."""
    before = [buffer.clone() for buffer in model.buffers()]
    losses: list[float] = []
    seconds: list[float] = []
    for rank in reversed(range(len(batches))):  # rank 0 comes last: its buffers stay
        _restore(model.buffers(), before)
        inputs, targets = next(batches[rank])
        start = time.process_time()
        loss = loss_of(model, inputs, targets)
        (loss / sync_every).backward()
        seconds.append(time.process_time() - start)
        ranks.add(rank)
        losses.append(loss.item())
    return sum(losses) / len(losses), max(seconds)


def _restore(buffers: Iterator[Tensor], values: Sequence[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)
