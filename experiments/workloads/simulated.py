"""A training whose ranks are simulated: one model, the ranks' batches in turn, averages by their programs in lock step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ...compress import Compressor, Ranks, Simulation, Traffic, compressor
from ...compress.state.tree import Leaves
from ..bucket_plan import bucket_layouts
from ..results.comparison import RunResult, Seconds
from .checkpoint import Checkpoint
from .communication import Communication
from .data import Dataset
from .history import History
from .memory import reset_peak_memory
from .optimizers import optimizers_for, update
from .training import CPU, REPORT_EVERY, Report, TrainingConfig, filled, initial_model, loss_of, result_here

CHECKPOINT_EVERY = 100  # steps


class SimulatedRanks:
    """The gradients of several ranks for one model, in DDP's first buckets, and a compressor's state for each of them.

    Between `begin(rank)` and the next call, a backward adds to the gradients of this rank. `average` puts the averages of
    all ranks into the model's gradients.
    """

    def __init__(
        self, model: nn.Module, built: Compressor, world_size: int, bucket_mb: float | None, device: torch.device = CPU
    ) -> None:
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        layouts = bucket_layouts(dict(reversed(parameters.items())), bucket_mb, Ranks(world_size), device)
        self.parameters = [parameters[name] for layout in layouts for name in layout.names]
        self.buckets = [Simulation(built, layout) for layout in layouts]
        sizes = [layout.numel for layout in layouts]
        self.gradients = [torch.zeros(sum(sizes), device=device) for _ in range(world_size)]
        self.parts = [gradient.split(sizes) for gradient in self.gradients]
        self.elements, self.world_size = sum(sizes), world_size
        self.last, self.total = Traffic(), Traffic()

    def begin(self, rank: int) -> None:
        """Have the model's gradients be this rank's."""
        self._assign(self.parts[rank])

    def average(self) -> None:
        """Have the model's gradients be the averages of the step; the ranks' own become zero."""
        self.last = Traffic()
        averages = []
        for bucket, flats in zip(self.buckets, zip(*self.parts, strict=True), strict=True):
            averages.append(bucket.step(flats)[0])
            self.last += bucket.traffic
        self.total += self.last
        self._assign(averages)
        for gradient in self.gradients:
            gradient.zero_()

    def _assign(self, flats: Sequence[Tensor]) -> None:
        pairs = zip(self.buckets, flats, strict=True)
        views = [view for bucket, flat in pairs for view in bucket.layouts[0].views(flat).values()]
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.grad = view

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the compressors, after `average`."""
        saved = [[Leaves(state).save() for state in bucket.states] for bucket in self.buckets]
        return {"compressors": saved, "last": asdict(self.last), "total": asdict(self.total)}

    def load(self, saved: dict[str, Any], step: int) -> None:
        """Continue after `step` steps from a checkpoint."""
        for bucket, ranks in zip(self.buckets, saved["compressors"], strict=True):
            for leaves, entries in zip(map(Leaves, bucket.states), ranks, strict=True):
                leaves.load(entries)
                leaves.set_step(step)
        self.last, self.total = Traffic(**saved["last"]), Traffic(**saved["total"])


class SimulatedTraining:
    """A model, its optimizers and simulated ranks with their batches, step after step.

    Buffers, such as running statistics, are rank 0's. Seconds are CPU seconds of one rank: a step is the slowest rank's
    forward and backward, a rank's share of the programs (`averaging` in total) and the optimizer; no network is part of it.
    """

    def __init__(self, spec: str, config: TrainingConfig, dataset: Dataset, world_size: int) -> None:
        self.config, self.history, self.averaging = config, History(), 0.0
        self.model = initial_model(config, dataset, CPU)
        self.optimizers = optimizers_for(self.model, spec, config.optimizer, config.rate, config.momentum)
        self.compressor = filled(spec, config, self.optimizers)
        self.ranks = SimulatedRanks(self.model, compressor(self.compressor), world_size, config.bucket_mb)
        self.schedules = config.schedules(self.optimizers)
        self.batches = [
            dataset.train_batches(config.batch_size, seed=config.seed, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]

    @property
    def done(self) -> int:
        """Return the number of finished steps."""
        return len(self.history.losses)

    def step(self) -> None:
        """Train on one batch per rank; average and update the model where gradients are complete."""
        loss, seconds = self._gradients()
        if (self.done + 1) % self.config.sync_every == 0:
            start = time.process_time()
            self.ranks.average()
            share = (time.process_time() - start) / self.ranks.world_size
            start = time.process_time()
            update(self.optimizers, self.schedules)
            seconds += share + time.process_time() - start
            self.averaging += share
        self.history.add(loss, seconds)

    def _gradients(self) -> tuple[float, float]:
        """Run forward and backward of one batch per rank. Return their mean loss, and the seconds of the slowest."""
        before = [buffer.clone() for buffer in self.model.buffers()]
        losses: list[float] = []
        seconds: list[float] = []
        for rank in reversed(range(len(self.batches))):  # rank 0 comes last: its buffers stay
            for buffer, value in zip(self.model.buffers(), before, strict=True):
                buffer.copy_(value)
            inputs, targets = next(self.batches[rank])
            self.ranks.begin(rank)
            start = time.process_time()
            loss = loss_of(self.model, inputs, targets, autocast=self.config.autocast)
            (loss / self.config.sync_every).backward()
            seconds.append(time.process_time() - start)
            losses.append(loss.item())
        return sum(losses) / len(losses), max(seconds)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds, between two optimizer steps."""
        return {
            "history": asdict(self.history),
            "averaging": self.averaging,
            "model": self.model.state_dict(),
            "optimizers": [each.state_dict() for each in self.optimizers],
            "schedules": [each.state_dict() for each in self.schedules],
            "ranks": self.ranks.state(),
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Continue from a checkpoint, with the batches that come next."""
        self.history, self.averaging = History(**saved["history"]), saved["averaging"]
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        for schedule, state in zip(self.schedules, saved["schedules"], strict=True):
            schedule.load_state_dict(state)
        self.ranks.load(saved["ranks"], self.done // self.config.sync_every)
        for batches in self.batches:
            next(islice(batches, self.done, self.done), None)


def train_simulated(
    spec: str,
    config: TrainingConfig,
    dataset: Dataset,
    world_size: int,
    report: Report,
    checkpoint_of: Callable[[str], Checkpoint | None] = lambda ran: None,
) -> RunResult:
    """Return the result of `train` on `world_size` ranks, by this process alone: losses and bytes are theirs to round-off.

    The training continues from the checkpoint that `checkpoint_of` returns for the compressor with all of its options. It
    writes this every 100 steps, and deletes it at the end.
    """
    reset_peak_memory(CPU)
    training = SimulatedTraining(spec, config, dataset, world_size)
    checkpoint = checkpoint_of(training.compressor)
    if checkpoint is not None and (saved := checkpoint.read()) is not None:
        training.load(saved)
    history = training.history
    while training.done < config.steps:
        training.step()
        if training.done % REPORT_EVERY == 0 or training.done == config.steps:
            report(history.look_at(history.losses[len(history.mean_losses) :]))
        synced = training.done % config.sync_every == 0
        if checkpoint is not None and training.done % CHECKPOINT_EVERY == 0 and synced:
            checkpoint.write(training.state())
    ranks, model = training.ranks, training.model
    seconds = Seconds(encode=training.averaging / config.optimizer_steps, wait=0.0, decode=0.0)
    per_host = ranks.buckets[0].layouts[0].ranks.per_host
    sent = Communication(ranks.last, ranks.total.sent_bytes, seconds, config.optimizer_steps, per_host)
    result = result_here(spec, training.compressor, config, model, dataset, sent, history, world_size)
    if checkpoint is not None:
        checkpoint.delete()
    return result
