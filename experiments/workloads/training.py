"""One training run with one compressor, on this rank."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ...compress import Traffic, compressor, warm_up_steps
from ...ddp_core import Decorator, DistributedDataParallel, Record, averaged, exchange
from ...hooks import Handle, ShardHandle, Stats, attach
from ...hooks.plan import ratio
from ..results.comparison import Evaluation, RunResult, Seconds
from ..results.statistics import percentiles
from .data import DataConfig, Dataset
from .memory import peak_memory, reset_peak_memory
from .models import ModelConfig, build_model
from .sharding import copy_whole, sharded, torchs_traffic, without_sync

REPORT_EVERY = 10  # steps between two looks at the loss of all ranks
NOT_MEASURED = Seconds(encode=0.0, wait=0.0, decode=0.0)
Steps: TypeAlias = Sequence[tuple[int, float, float]]  # number, mean loss over ranks, seconds of training at its end
Report: TypeAlias = Callable[[Steps], None]


@dataclass(frozen=True)
class TrainingConfig:
    """Model, data, optimizer and DistributedDataParallel of a training, whichever compressor it has."""

    model: ModelConfig
    data: DataConfig
    steps: int
    """batches of a rank"""
    sync_every: int
    """batches whose mean gradient makes an optimizer step; only the last of them communicates"""
    batch_size: int
    """samples a rank and step"""
    optimizer: Literal["adamw", "sgd"]
    lr: float
    momentum: float
    """of sgd"""
    seed: int
    """of the initial model and the order of samples"""
    bucket_mb: float | None
    """DDP's bucket size, MiB; None is 1 for the first and 25 for the others"""
    ddp: Literal["gradwire", "torch"]
    """whose DistributedDataParallel; torch's has gradwire's hook"""
    parallel: Literal["ddp", "fsdp"]
    """what trains it: DistributedDataParallel, or torch's FSDP2"""
    eval_batches: int
    """held-out batches at the end"""
    timeout: float
    """seconds that any wait for other ranks may take"""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "eval_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, got {getattr(self, name)}")
        for name in ("lr", "bucket_mb", "timeout"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name} is above 0, got {getattr(self, name)}")
        if not 1 <= self.sync_every <= self.steps:
            raise ValueError(f"sync_every is from 1 to steps, {self.steps}, got {self.sync_every}")


@dataclass
class History:
    """What a run has measured so far: this rank's `losses`, and `mean_losses` over ranks up to the last look."""

    losses: list[float] = field(default_factory=list)
    mean_losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    train_seconds: list[float] = field(default_factory=list)

    def add(self, loss: float, seconds: float) -> None:
        """A step has ended."""
        self.losses.append(loss)
        self.step_seconds.append(seconds)
        self.train_seconds.append(seconds + (self.train_seconds[-1] if self.train_seconds else 0.0))

    def look(self, group: dist.ProcessGroup, device: torch.device) -> Steps:
        """The steps since the last look. A collective call."""
        first = len(self.mean_losses)
        self.mean_losses += averaged(torch.tensor(self.losses[first:], device=device), group).tolist()
        numbers = range(first + 1, len(self.losses) + 1)
        return list(zip(numbers, self.mean_losses[first:], self.train_seconds[first:], strict=True))


def train(
    spec: str,
    config: TrainingConfig,
    dataset: Dataset,
    group: dist.ProcessGroup,
    device: torch.device,
    report: Report,
    transport: Decorator | None = None,
) -> RunResult:
    """Train the configured model with one compressor; every rank calls it and gets the same result.

    `report` is called every few steps with those since its last call, on every rank. `transport`: what to put around each
    transport. Raises RuntimeError where ranks end with different parameters.
    """
    reset_peak_memory(device)
    model = _model(config, dataset, device)
    wrapped, handle = _wrapped(model, spec, config, device, transport)
    history = _steps(wrapped, config, dataset, group, device, report)
    if config.parallel == "fsdp":
        model = _model(config, dataset, device)
        copy_whole(wrapped, model)
    evaluation = _evaluate(model, config, dataset, group, device)
    stats = None if handle is None else handle.stats()
    traffic = torchs_traffic(wrapped, group.size(), config.sync_every) if stats is None else stats.last.traffic
    result = _result(spec, config, model, stats, traffic, history, evaluation, group, device)
    if handle is not None:
        handle.close()  # not where this rank fails: its peers would fail, too, before it has told why
    return result


def _wrapped(
    model: nn.Module, spec: str, config: TrainingConfig, device: torch.device, transport: Decorator | None
) -> tuple[nn.Module, Handle | ShardHandle | None]:
    """The model as what is configured trains it, and the handle of its compression; None where torch communicates."""
    timeout = timedelta(seconds=config.timeout)
    if config.parallel == "fsdp":
        return model, sharded(model, spec, device, timeout, transport)
    if config.ddp == "torch":
        theirs = TorchDDP(model, bucket_cap_mb=config.bucket_mb, gradient_as_bucket_view=True)
        return theirs, attach(theirs, spec, timeout=timeout, transport=transport)
    ours = DistributedDataParallel(
        model,
        bucket_cap_mb=config.bucket_mb,
        gradient_as_bucket_view=True,
        compressor=spec,
        timeout=timeout,
        transport=transport,
    )
    return ours, ours.compression


def _model(config: TrainingConfig, dataset: Dataset, device: torch.device) -> nn.Module:
    """The same initial model for every rank and compressor; the caller's random state stays as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        return build_model(config.model, dataset).to(device)


def optimizer_for(model: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """The configured optimizer."""
    if config.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum)
    return torch.optim.AdamW(model.parameters(), lr=config.lr)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all positions, nats."""
    return functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def _steps(
    model: nn.Module,
    config: TrainingConfig,
    dataset: Dataset,
    group: dist.ProcessGroup,
    device: torch.device,
    report: Report,
) -> History:
    optimizer = optimizer_for(model, config)
    batches = dataset.train_batches(config.batch_size, seed=config.seed, rank=group.rank(), world_size=group.size())
    history = History()
    for step in range(config.steps):
        inputs, targets = (tensor.to(device) for tensor in next(batches))
        synced = (step + 1) % config.sync_every == 0
        start = time.perf_counter()
        with nullcontext() if synced else _unsynced(model):
            loss = loss_of(model, inputs, targets)
            (loss / config.sync_every).backward()
        if synced:
            optimizer.step()
            optimizer.zero_grad()
        history.add(loss.item(), time.perf_counter() - start)
        if (step + 1) % REPORT_EVERY == 0 or step + 1 == config.steps:
            report(history.look(group, device))
    return history


def _unsynced(model: nn.Module) -> AbstractContextManager[None]:
    """A backward inside does not communicate."""
    return model.no_sync() if isinstance(model, TorchDDP | DistributedDataParallel) else without_sync(model)


@torch.no_grad()
def _evaluate(
    model: nn.Module, config: TrainingConfig, dataset: Dataset, group: dist.ProcessGroup, device: torch.device
) -> Evaluation:
    """Loss and accuracy on held-out data; the ranks share the batches."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, hits, count
    for inputs, targets in _share(dataset.evaluation_batches(config.batch_size, config.eval_batches), group):
        logits = model(inputs.to(device)).flatten(0, -2)
        expected = targets.to(device).flatten()
        loss = functional.cross_entropy(logits, expected, reduction="sum")
        hits = (logits.argmax(-1) == expected).sum()
        sums += torch.stack([loss.double(), hits.double(), torch.tensor(expected.numel(), device=device)])
    model.train()
    loss_sum, hit_sum, count = averaged(sums, group).tolist()
    return Evaluation(loss=loss_sum / count, accuracy=hit_sum / count)


def _share(batches: Iterator[tuple[Tensor, Tensor]], group: dist.ProcessGroup) -> Iterator[tuple[Tensor, Tensor]]:
    for index, batch in enumerate(batches):
        if index % group.size() == group.rank():
            yield batch


def _result(
    spec: str,
    config: TrainingConfig,
    model: nn.Module,
    stats: Stats | None,
    last: Traffic,
    history: History,
    evaluation: Evaluation,
    group: dist.ProcessGroup,
    device: torch.device,
) -> RunResult:
    losses = history.mean_losses
    elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
    timed = history.step_seconds[min(len(history.step_seconds) // 5, 10) :]  # first steps build buckets and groups
    return RunResult(
        compressor=spec,
        steps=len(losses),
        loss=tuple(losses),
        eval=evaluation,
        step_seconds=percentiles(timed),
        seconds=NOT_MEASURED if stats is None else _mean_seconds(stats.total, stats.steps),
        payload_bytes_per_step=last.payload_bytes,
        sent_bytes_per_step=last.sent_bytes,
        compression_ratio=ratio(elements, last, group.size()),
        peak_memory_bytes=max(int(size) for size in exchange(str(peak_memory(device)), group)),
        train_seconds=tuple(history.train_seconds),
        parameters_digest=_same_digest(model, group),
        warmed_up=stats is None or config.parallel == "fsdp" or warm_up_steps(compressor(spec)) < stats.steps,
    )


def _mean_seconds(total: Record, steps: int) -> Seconds:
    return Seconds(encode=total.encode / steps, wait=total.wait / steps, decode=total.decode / steps)


def _same_digest(model: nn.Module, group: dist.ProcessGroup) -> str:
    """A digest of all parameters; RuntimeError unless it is the same on every rank."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    digests = exchange(digest.hexdigest(), group)
    if len(set(digests)) > 1:
        raise RuntimeError(f"the ranks ended with different parameters: {digests}")
    return digests[0]
