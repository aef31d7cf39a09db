"""One training run with one compressor, on this rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ...compress import Optimizers, compressor, warm_up_steps
from ...compress.builder.optimizer_defaults import tuned_specification
from ...ddp_core import Decorator, DistributedDataParallel, Handle, exchange, over
from ...hooks.fsdp import ShardHandle
from ...hooks.local_sgd.local_steps import LocalSteps
from ...hooks.local_sgd.outer import outer
from ...hooks.torch_ddp import attach
from ..bucket_plan import Plan, plan, ratio
from ..network.ranks_config import RanksConfig
from ..results.comparison import Evaluation, RunResult
from ..results.statistics import percentiles
from ..results.time_to_loss import REPEATS
from ..sharded_plan import plan_sharded
from .communication import FRAGMENTS, Communication, of_handle, of_local, of_torch
from .data import DataConfig, Dataset
from .evaluation import digest_of, evaluate, evaluation_of, held_out_sums, same_digest
from .history import History, Steps
from .memory import peak_memory, reset_peak_memory
from .models import ModelConfig, build_model
from .optimizers import RATES, OptimizerName, optimizers_for, schedule_for, update
from .order import BACKWARD, Order, drain, ordered
from .sharding import TORCH, copy_whole, parts, payloads, shard, torchs_traffic, tuned_payloads, without_sync
from .turns import Training

LONGEST_TURN = 5  # steps: short enough that a change of the host's speed hits the turns of all trainings
REPORT_EVERY = 10  # steps between two looks at the loss of all ranks
CPU = torch.device("cpu")  # of simulated ranks
Report: TypeAlias = Callable[[Steps], None]


@dataclass(frozen=True)
class TrainingConfig(RanksConfig):
    """Ranks, and what they train: model, data, optimizer and DistributedDataParallel, whichever compressor it has."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """model to train, and its sizes"""
    data: DataConfig = field(default_factory=DataConfig)
    """data set to train on"""
    steps: int = 100
    """number of batches per rank for each compressor"""
    sync_every: int = 1
    """number of batches whose gradients are accumulated for one optimizer step; only the last one communicates"""
    batch_size: int = 8
    """samples per rank and batch"""
    autocast: bool = False
    """run forward and backward in bfloat16 by torch.autocast; parameters and gradients stay float32. Faster where the
    processor multiplies bfloat16"""
    optimizer: OptimizerName = "sgd"
    """optimizer, the same for all compressors; muon is for the matrices of gpt's blocks, with adamw beside it"""
    lr: float | None = None
    """learning rate; null gives 0.1 for sgd, 0.003 for adamw and 0.005 for muon"""
    momentum: float = 0.5
    """momentum of sgd"""
    schedule: Literal["constant", "cosine"] = "constant"
    """learning-rate schedule after the warm-up; cosine ends at zero"""
    warmup: int = 0
    """number of optimizer steps in which the learning rate grows to its full value"""
    seed: int = 0
    """seed of the initial model and of the order of samples"""
    bucket_mb: float | None = None
    """DDP's bucket size in MiB; null gives 1 for the first bucket and 25 for the others"""
    ddp: Literal["gradwire", "torch"] = "gradwire"
    """DistributedDataParallel to use: gradwire's own, or torch's with gradwire's hook"""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """ddp, or fsdp for torch's FSDP2; with fsdp a compressor is WEIGHTS/GRADIENTS such as int8/int4, one word for
    both, or torch"""
    local_every: int = 0
    """average the models every N optimizer steps by local SGD (gradwire.LocalSteps); 0 averages the gradients of
    every step"""
    local_outer: str | None = None
    """outer optimizer of local SGD: average, diloco, muloco, slowmo, or values such as nesterov:lr=0.7,momentum=0.9. By
    default muloco with Muon, else average"""
    order: Order = BACKWARD
    """order in which gradients are sent. backward waits for all of them after backward. slices sends pieces of at
    most 2 MiB. priority sends pieces and overlaps them with the next forward pass"""
    eval_batches: int = 40
    """number of validation batches at the end"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model.refuse_own("compare")
        if self.lr is None:
            object.__setattr__(self, "lr", RATES[self.optimizer])  # what results and checkpoints have
        for name in ("steps", "batch_size", "eval_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, got {getattr(self, name)}")
        for name in ("lr", "bucket_mb"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name} is above 0, got {getattr(self, name)}")
        if not 1 <= self.sync_every <= self.steps:
            raise ValueError(f"sync_every is from 1 to steps, {self.steps}, got {self.sync_every}")
        if self.optimizer == "muon" and self.model.family != "gpt":
            raise ValueError(f"optimizer muon is for gpt, and the model is {self.model.name}: choose adamw or sgd")
        if self.order != BACKWARD and self.ddp == "torch":
            raise ValueError(f"order {self.order} needs gradwire's DistributedDataParallel: leave out --ddp torch")
        if self.local_every:
            self._check_local()
        if not 0 <= self.warmup < self.optimizer_steps:
            raise ValueError(
                f"warmup is at least 0 and less than the optimizer steps, {self.optimizer_steps}, got {self.warmup}"
            )

    def _check_local(self) -> None:
        if self.local_every < 1:
            raise ValueError(f"local_every is at least 1, or 0 for none; got {self.local_every}")
        if self.parallel != "ddp" or self.order != BACKWARD:
            raise ValueError("local SGD trains the bare model: leave out parallel and order")
        if self.local_outer is not None:
            outer(self.local_outer)

    @property
    def rate(self) -> float:
        """The learning rate."""
        return self.lr or RATES[self.optimizer]

    @property
    def optimizer_steps(self) -> int:
        """Steps of the optimizer in the run."""
        return self.steps // self.sync_every

    def schedules(self, optimizers: Sequence[Optimizer]) -> list[LambdaLR]:
        """The learning rates of a run."""
        return [schedule_for(each, self.schedule, self.warmup, self.optimizer_steps) for each in optimizers]

    @property
    def turn_steps(self) -> int:
        """Batches per turn: whole optimizer steps, and few enough for all repeats where the run is long enough."""
        wanted = min(LONGEST_TURN, self.steps // (REPEATS + 1))
        return max(1, math.ceil(wanted / self.sync_every)) * self.sync_every


def train(
    spec: str,
    config: TrainingConfig,
    dataset: Dataset,
    group: dist.ProcessGroup,
    device: torch.device,
    report: Report,
    transport: Decorator | None = None,
    *,
    turns: bool = False,
) -> Training:
    """Train the configured model with one compressor; every rank runs it and gets the same result.

    `report` is called every few steps with those since its last call, on every rank. `transport`: what to put around each
    transport. `turns`: whether to pause after each turn. Raises RuntimeError where ranks end with different parameters.
    """
    if not turns:
        reset_peak_memory(device)
    model = initial_model(config, dataset, device)
    if config.parallel == "fsdp":
        shard(model, device)
    momentum_of = "none" if config.parallel == "fsdp" or config.local_every else spec
    optimizers = optimizers_for(model, momentum_of, config.optimizer, config.rate, config.momentum)
    ran = filled(spec, config, optimizers)
    wrapped, handle = _wrapped(model, ran, config, optimizers, transport)
    optimizers = ordered(wrapped, optimizers, config.order)
    local = local_steps(spec, config, wrapped, optimizers, transport) if config.local_every else None
    at_end = local.synchronize if local else (lambda: None)
    turn_steps = config.turn_steps if turns else None
    history = yield from _steps(wrapped, optimizers, config, dataset, group, device, report, at_end, turn_steps)
    if config.parallel == "fsdp":
        model = initial_model(config, dataset, device)
        copy_whole(wrapped, model)
    evaluation = evaluate(model, dataset, config.batch_size, config.eval_batches, group, device)
    if local is not None:
        sent = of_local(local, config.optimizer_steps)
    elif handle is not None:
        sent = of_handle(handle)
    else:
        sent = of_torch(torchs_traffic(wrapped, group.size(), config.sync_every), config.optimizer_steps)
    peak = None if turns else max(map(int, exchange(str(peak_memory(device)), over(group))))
    digest = same_digest(model, group)
    result = result_of(spec, ran, config, model, sent, history, evaluation, group.size(), digest, peak, turn_steps)
    used = local or handle
    if used is not None:
        used.close()  # not where this rank fails: its peers would fail, too, before it has told why
    return result


def _wrapped(
    model: nn.Module, spec: str, config: TrainingConfig, optimizers: Optimizers, transport: Decorator | None
) -> tuple[nn.Module, Handle | ShardHandle | None]:
    """The model as what is configured trains it, and the handle of its compression; None for torch's and local SGD."""
    options: dict[str, Any] = {
        "optimizer": optimizers,
        "timeout": timedelta(seconds=config.timeout),
        "transport": transport,
    }
    if config.local_every or spec == TORCH:
        return model, None
    if config.parallel == "fsdp":
        gather, reduce = payloads(spec)
        return model, attach(model, gather=gather, reduce=reduce, **options)
    if config.ddp == "torch":
        theirs = TorchDDP(model, bucket_cap_mb=config.bucket_mb, gradient_as_bucket_view=True)
        return theirs, attach(theirs, spec, **options)
    ours = DistributedDataParallel(
        model,
        bucket_cap_mb=config.bucket_mb,
        gradient_as_bucket_view=True,
        compressor=spec,
        **options,
    )
    return ours, ours.compression


def local_steps(
    spec: str,
    config: TrainingConfig,
    model: nn.Module,
    optimizers: Optimizers,
    transport: Decorator | None = None,
    at: Any = None,
) -> LocalSteps:
    """Begin local SGD of a model. `at` finds the sites, by default all ranks of the process group."""
    return LocalSteps(
        model,
        optimizers,
        every=config.local_every,
        outer=config.local_outer,
        compressor=spec,
        fragments=min(FRAGMENTS, config.local_every),
        timeout=timedelta(seconds=config.timeout),
        transport=transport,
        at=at,
    )


def initial_model(config: TrainingConfig, dataset: Dataset, device: torch.device) -> nn.Module:
    """The same initial model for every rank and compressor; the caller's random state stays as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        return build_model(config.model, dataset).to(device)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, *, autocast: bool = False) -> Tensor:
    """Mean cross-entropy over all positions, nats; by `autocast` the model computes in bfloat16, the loss in float32."""
    with torch.autocast(inputs.device.type, torch.bfloat16) if autocast else nullcontext():
        outputs = model(inputs)
    return functional.cross_entropy(outputs.float().flatten(0, -2), targets.flatten())


def filled(spec: str, config: TrainingConfig, optimizers: Optimizers) -> str:
    """Return a compressor with the options that `gradwire.attach` adds for the optimizers. LocalSteps adds none."""
    if config.local_every or spec == TORCH:
        return spec
    return tuned_payloads(spec, optimizers) if config.parallel == "fsdp" else tuned_specification(spec, optimizers)


def _steps(
    model: nn.Module,
    optimizers: list[Optimizer],
    config: TrainingConfig,
    dataset: Dataset,
    group: dist.ProcessGroup,
    device: torch.device,
    report: Report,
    at_end: Callable[[], None],
    turn_steps: int | None,
) -> Generator[None, None, History]:
    """Train, and pause after each turn with nothing under way."""
    schedules = config.schedules(optimizers)
    batches = dataset.train_batches(config.batch_size, seed=config.seed, rank=group.rank(), world_size=group.size())
    history = History()
    for step in range(config.steps):
        inputs, targets = (tensor.to(device) for tensor in next(batches))
        synced = (step + 1) % config.sync_every == 0
        start = time.perf_counter()
        with nullcontext() if synced else _unsynced(model):
            loss = loss_of(model, inputs, targets, autocast=config.autocast)
            (loss / config.sync_every).backward()
        if synced:
            update(optimizers, schedules)
        ends_turn = turn_steps is not None and (step + 1) % turn_steps == 0
        if ends_turn or step + 1 == config.steps:
            drain(optimizers)
        if step + 1 == config.steps:
            at_end()
        history.add(loss.item(), time.perf_counter() - start)
        if (step + 1) % REPORT_EVERY == 0 or step + 1 == config.steps:
            report(history.look(group, device))
        if ends_turn and step + 1 < config.steps:
            yield
    return history


def _unsynced(model: nn.Module) -> AbstractContextManager[None]:
    """A backward inside does not communicate."""
    if isinstance(model, TorchDDP | DistributedDataParallel):
        return model.no_sync()
    return without_sync(model) if hasattr(model, "set_requires_gradient_sync") else nullcontext()


def result_of(
    spec: str,
    ran: str,
    config: TrainingConfig,
    model: nn.Module,
    sent: Communication,
    history: History,
    evaluation: Evaluation,
    ranks: int,
    digest: str,
    peak_bytes: int | None,
    turn_steps: int | None = None,
) -> RunResult:
    """Return the result of a training that has ended, on real ranks or on simulated ones. `ran`: what `filled` returned."""
    losses = history.mean_losses
    gradient_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    planned = _planned(model, ran, config, ranks)
    return RunResult(
        compressor=spec,
        tuned=None if ran == spec else ran,
        steps=len(losses),
        loss=tuple(losses),
        eval=evaluation,
        step_seconds=percentiles(steady(history.step_seconds)),
        seconds=sent.seconds,
        payload_bytes_per_step=sent.traffic.payload_bytes,
        sent_bytes_per_step=sent.traffic.sent_bytes,
        compression_ratio=ratio(gradient_bytes, sent.traffic, ranks, sent.per_host),
        peak_memory_bytes=peak_bytes,
        train_seconds=tuple(history.train_seconds),
        parameters_digest=digest,
        warmed_up=config.parallel == "fsdp" or warm_up_steps(compressor(spec)) < sent.averages,
        total_sent_bytes=sent.total_sent_bytes,
        turn_steps=turn_steps,
        planned_bytes=None if planned is None else planned.peak_bytes,
        planned_state_bytes=None if planned is None else planned.state_bytes,
    )


def result_here(
    spec: str,
    ran: str,
    config: TrainingConfig,
    model: nn.Module,
    dataset: Dataset,
    sent: Communication,
    history: History,
    ranks: int,
) -> RunResult:
    """Return the result of a training whose ranks are simulated in this process, of which this is the model."""
    batches = dataset.evaluation_batches(config.batch_size, config.eval_batches)
    evaluation, peak = evaluation_of(held_out_sums(model, batches, CPU)), peak_memory(CPU)
    return result_of(spec, ran, config, model, sent, history, evaluation, ranks, digest_of(model), peak)


def _planned(model: nn.Module, spec: str, config: TrainingConfig, ranks: int) -> Plan | None:
    """The compressor's plan; None for local SGD, which has other memory, and torch's own shards."""
    if config.local_every or spec == TORCH:
        return None
    if config.parallel == "fsdp":
        return plan_sharded(parts(model), *payloads(spec), world_size=ranks)
    return plan(model, spec, world_size=ranks, bucket_mb=config.bucket_mb)


def steady(step_seconds: Sequence[float]) -> Sequence[float]:
    """Without the first steps, which build buckets and groups."""
    return step_seconds[min(len(step_seconds) // 5, 10) :]
