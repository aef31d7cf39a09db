"""One training run with one compressor, on this rank."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ...compress import compressor, warm_up_steps
from ...ddp_core import Decorator, DistributedDataParallel, Record, averaged, exchange
from ...hooks import Handle, attach
from ...hooks.plan import ratio
from ..results.comparison import Evaluation, RunResult, Seconds
from ..results.statistics import percentiles
from .data import DataConfig, Dataset
from .memory import peak_memory, reset_peak_memory
from .models import ModelConfig, build_model
from .optimizers import optimizer_for, schedule_for
from .order import BACKWARD, Order, drain, ordered
from .sample import Batch

REPORT_EVERY = 10  # steps between two looks at the loss of all ranks
Replica: TypeAlias = TorchDDP | DistributedDataParallel
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
    schedule: Literal["constant", "cosine"]
    """of the learning rate after its warm-up; cosine ends at zero"""
    warmup: int
    """optimizer steps in which the learning rate grows to `lr`"""
    seed: int
    """of the initial model and the order of samples"""
    bucket_mb: float | None
    """DDP's bucket size, MiB; None is 1 for the first and 25 for the others"""
    ddp: Literal["gradwire", "torch"]
    """whose DistributedDataParallel; torch's has gradwire's hook"""
    order: Order
    """in which gradients go; other orders than backward's with gradwire's DistributedDataParallel only"""
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
        if self.order != BACKWARD and self.ddp == "torch":
            raise ValueError(f"order {self.order} needs gradwire's DistributedDataParallel: leave out --ddp torch")
        if not 0 <= self.warmup < self.optimizer_steps:
            raise ValueError(
                f"warmup is at least 0 and less than the optimizer steps, {self.optimizer_steps}, got {self.warmup}"
            )

    @property
    def optimizer_steps(self) -> int:
        """Steps of the optimizer in the run."""
        return self.steps // self.sync_every


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
        new = torch.tensor(self.losses[len(self.mean_losses) :], device=device)
        return self.look_at(averaged(new, group).tolist())

    def look_at(self, mean_losses: Sequence[float]) -> Steps:
        """The steps since the last look, whose mean losses over ranks these are."""
        first = len(self.mean_losses)
        self.mean_losses += mean_losses
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
    model = initial_model(config, dataset, device)
    wrapped, handle = _wrapped(model, spec, config, transport)
    history = _steps(wrapped, spec, config, dataset, group, device, report)
    evaluation = _evaluate(model, config, dataset, group, device)
    result = _result(spec, model, handle, history, evaluation, group, device)
    handle.close()  # not where this rank fails: its peers would fail, too, before it has told why
    return result


def _wrapped(
    model: nn.Module, spec: str, config: TrainingConfig, transport: Decorator | None
) -> tuple[Replica, Handle]:
    """The model as the configured DDP trains it, and the handle of its compression."""
    timeout = timedelta(seconds=config.timeout)
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


def initial_model(config: TrainingConfig, dataset: Dataset, device: torch.device) -> nn.Module:
    """The same initial model for every rank and compressor; the caller's random state stays as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        return build_model(config.model, dataset).to(device)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all positions, nats."""
    return functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def _steps(
    model: Replica,
    spec: str,
    config: TrainingConfig,
    dataset: Dataset,
    group: dist.ProcessGroup,
    device: torch.device,
    report: Report,
) -> History:
    optimizer = ordered(model, optimizer_for(model, spec, config.optimizer, config.lr, config.momentum), config.order)
    schedule = schedule_for(optimizer, config.schedule, config.warmup, config.optimizer_steps)
    batches = dataset.train_batches(config.batch_size, seed=config.seed, rank=group.rank(), world_size=group.size())
    history = History()
    for step in range(config.steps):
        inputs, targets = (tensor.to(device) for tensor in next(batches))
        synced = (step + 1) % config.sync_every == 0
        start = time.perf_counter()
        with nullcontext() if synced else model.no_sync():
            loss = loss_of(model, inputs, targets)
            (loss / config.sync_every).backward()
        if synced:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if step + 1 == config.steps:
            drain(optimizer)
        history.add(loss.item(), time.perf_counter() - start)
        if (step + 1) % REPORT_EVERY == 0 or step + 1 == config.steps:
            report(history.look(group, device))
    return history


def _evaluate(
    model: nn.Module, config: TrainingConfig, dataset: Dataset, group: dist.ProcessGroup, device: torch.device
) -> Evaluation:
    """Loss and accuracy on held-out data; the ranks share the batches."""
    batches = dataset.evaluation_batches(config.batch_size, config.eval_batches)
    return evaluation_of(averaged(held_out_sums(model, _share(batches, group), device), group))


@torch.no_grad()
def held_out_sums(model: nn.Module, batches: Iterator[Batch], device: torch.device) -> Tensor:
    """Loss, right answers and answers of the batches, summed: (3,) float64."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for inputs, targets in batches:
        logits = model(inputs.to(device)).flatten(0, -2)
        expected = targets.to(device).flatten()
        loss = functional.cross_entropy(logits, expected, reduction="sum")
        hits = (logits.argmax(-1) == expected).sum()
        sums += torch.stack([loss.double(), hits.double(), torch.tensor(expected.numel(), device=device)])
    model.train()
    return sums


def evaluation_of(sums: Tensor) -> Evaluation:
    """The means, from the sums of all batches or their mean over ranks."""
    loss_sum, hit_sum, count = sums.tolist()
    return Evaluation(loss=loss_sum / count, accuracy=hit_sum / count)


def _share(batches: Iterator[Batch], group: dist.ProcessGroup) -> Iterator[Batch]:
    for index, batch in enumerate(batches):
        if index % group.size() == group.rank():
            yield batch


def _result(
    spec: str,
    model: nn.Module,
    handle: Handle,
    history: History,
    evaluation: Evaluation,
    group: dist.ProcessGroup,
    device: torch.device,
) -> RunResult:
    losses = history.mean_losses
    stats = handle.stats()
    last = stats.last.traffic
    elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return RunResult(
        compressor=spec,
        steps=len(losses),
        loss=tuple(losses),
        eval=evaluation,
        step_seconds=percentiles(steady(history.step_seconds)),
        seconds=_mean_seconds(stats.total, stats.steps),
        payload_bytes_per_step=last.payload_bytes,
        sent_bytes_per_step=last.sent_bytes,
        compression_ratio=ratio(elements, last, group.size()),
        peak_memory_bytes=max(int(size) for size in exchange(str(peak_memory(device)), group)),
        train_seconds=tuple(history.train_seconds),
        parameters_digest=_same_digest(model, group),
        warmed_up=warm_up_steps(compressor(spec)) < stats.steps,
        total_sent_bytes=stats.total.traffic.sent_bytes,
    )


def steady(step_seconds: Sequence[float]) -> Sequence[float]:
    """Without the first steps, which build buckets and groups."""
    return step_seconds[min(len(step_seconds) // 5, 10) :]


def _mean_seconds(total: Record, steps: int) -> Seconds:
    return Seconds(encode=total.encode / steps, wait=total.wait / steps, decode=total.decode / steps)


def _same_digest(model: nn.Module, group: dist.ProcessGroup) -> str:
    """A digest of all parameters; RuntimeError unless it is the same on every rank."""
    digests = exchange(digest_of(model), group)
    if len(set(digests)) > 1:
        raise RuntimeError(f"the ranks ended with different parameters: {digests}")
    return digests[0]


def digest_of(model: nn.Module) -> str:
    """SHA-256 of all parameters, in hexadecimal digits."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
