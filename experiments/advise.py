"""`gradwire advise`: measure on ranks that a launcher has started, or on ranks of its own, and tell what to do."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from ..compress import Optimizers, compressor
from ..ddp_core import adopt_launcher
from .advice import Advice, Forecast, Rule, advise
from .advice.trials import TRIAL_SECONDS, checked_seconds
from .network.lab import backend_here, rerun_on_hosts
from .network.link import over_link
from .ranks.device import chosen_backend, device_here
from .ranks.group import joined
from .ranks.launchers import threads_here
from .ranks.processes import supervised
from .results.files import check_file, command_line, environment, write_json
from .workloads.data import data_shape
from .workloads.emulation import EmulatedModel, EmulationConfig
from .workloads.models import ModelConfig, build_model
from .workloads.models.own import on_device, own_training
from .workloads.optimizers import OptimizerName, optimizers_for
from .workloads.training import loss_of

LR, MOMENTUM, WEIGHT_DECAY = 0.001, 0.9, 1e-4  # what they are does not matter to seconds
FEWEST_RANKS = 2


@dataclass(frozen=True)
class AdviseConfig(EmulationConfig):
    """Measure a training and its network, predict a step of each compressor and order, and recommend one."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """model to train, and its sizes"""
    batch_size: int = 8
    """samples per rank and step; a FILE.py:FUNCTION and the trace of an emulated accelerator have their own"""
    optimizer: OptimizerName = "sgd"
    """optimizer (sgd: momentum 0.9; muon: for gpt, with adamw beside it); a compressor's loss depends on it"""
    compressors: list[str] = field(default_factory=list)
    """compressors to choose from, separated by commas; if not given, those whose loss was studied"""
    hosts: list[int] = field(default_factory=list)
    """also predict the step time on these numbers of hosts, such as 16,64,1024"""
    tolerance: float = Rule.tolerance
    """largest relative increase of the validation loss that a compressor may cost"""
    worthwhile: float = Rule.worthwhile
    """minimum speed-up of a compressor over the one before it, at first none"""
    trial_seconds: float = TRIAL_SECONDS
    """about how many seconds to spend on real steps with the recommended compressor; 0 only predicts"""
    bucket_mb: float | None = None
    """DDP's bucket size in MiB; null gives 1 for the first bucket and 25 for the others"""
    json: str | None = None
    """write all predictions to this file"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size < 1:
            raise ValueError(f"batch_size is at least 1, got {self.batch_size}")
        if self.optimizer == "muon" and (self.trace is not None or self.model.family != "gpt"):
            raise ValueError("optimizer muon is for --model gpt without an emulated accelerator: choose adamw or sgd")
        if self.optimizer == "muon" and not hasattr(torch.optim, "Muon"):
            raise ValueError("optimizer muon is torch.optim.Muon, which torch has since 2.9: install a newer torch")
        if too_few := [count for count in self.hosts if count < 2]:
            raise ValueError(f"hosts are at least 2, got {too_few[0]}")
        if self.bucket_mb is not None and not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb is above 0, got {self.bucket_mb}")
        for spec in self.compressors:
            compressor(spec)
        _ = self.rule  # checked as it is made
        checked_seconds(self.trial_seconds)
        check_file("json", self.json)

    @property
    def rule(self) -> Rule:
        """By which one is recommended."""
        return Rule(self.tolerance, self.worthwhile)


def advise_command(config: AdviseConfig) -> int:
    """Measure, show and write; the command's exit code. What can be refused is refused before any rank starts."""
    if (code := rerun_on_hosts(config.slowed_netlab)) is not None:
        return code
    launched = adopt_launcher() is not None
    ranks = int(os.environ["WORLD_SIZE"]) if launched else config.nproc
    if ranks < FEWEST_RANKS:
        raise ValueError(f"advice needs two ranks or more, and there is {ranks}: --nproc 2, or torchrun on hosts")
    on_one_host = not launched or os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    if config.hosts and on_one_host and not (config.link or config.netlab.hosts):
        raise ValueError(
            "--hosts needs ranks on two hosts or more, or --link 10gbit or --netlab.hosts 2. Or compute a step by "
            "gradwire plan --parameters 124M --hosts 2 --gpus-per-host 8 --rate 10gbit"
        )
    with torch.device("meta"):
        _model(config)
    wanted = backend_here(config.backend, config.link)
    backend = chosen_backend(wanted, int(os.environ.get("LOCAL_WORLD_SIZE", config.nproc)))
    if launched:
        run_rank(int(os.environ["RANK"]), None, config, backend)
        return 0
    return supervised(run_rank, config.nproc, config, backend)


def run_rank(rank: int, rendezvous: dict[str, Any] | None, config: AdviseConfig, backend: str) -> None:
    """This rank's part; the first one shows and writes."""
    os.environ.setdefault("LOCAL_RANK", str(rank))
    torch.set_num_threads(threads_here(config.threads, config.nproc))
    device = device_here(backend)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, batch, loss = _training(config, device)
    limit = timedelta(seconds=config.timeout)
    with joined(backend, limit, rendezvous) as group:
        advice = advise(
            model,
            loss,
            batch,
            _optimizers(config, model),
            compressors=config.compressors or None,
            hosts=config.hosts,
            tolerance=config.tolerance,
            worthwhile=config.worthwhile,
            trial_seconds=config.trial_seconds,
            bucket_mb=config.bucket_mb,
            process_group=group,
            transport=over_link(config.slowed_link),
            timeout=limit,
        )
    if rank == 0:
        _show_and_write(config, advice)


def _model(config: AdviseConfig) -> nn.Module:
    return build_model(config.model) if config.trace is None else EmulatedModel(config.trace, config.dilate)


def _training(config: AdviseConfig, device: torch.device) -> tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]:
    """Return the model, a batch on the device, and the loss of both."""
    if config.trace is None and config.model.own:
        model, batch, loss = own_training(config.model.name)
        return model.to(device), on_device(batch, device), loss
    batch = None if config.trace is not None else data_shape(None, config.model).example(config.batch_size)
    return _model(config).to(device), on_device(batch, device), _loss


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor] | None) -> Tensor:
    loss: Tensor = model() if batch is None else loss_of(model, *batch)
    return loss


def _optimizers(config: AdviseConfig, model: nn.Module) -> Optimizers:
    """Fused where computation is emulated: its time on this processor is not what is emulated."""
    if config.optimizer == "muon":
        muon, adamw = optimizers_for(model, "none", "muon", LR, MOMENTUM)
        return [torch.optim.Muon(muon.param_groups[0]["params"], LR), adamw]  # torch's, which overlap() knows
    fused = True if config.trace is not None else None
    if config.optimizer == "adamw":
        return AdamW(model.parameters(), LR, fused=fused)
    return SGD(model.parameters(), LR, MOMENTUM, weight_decay=WEIGHT_DECAY, fused=fused)


def _show_and_write(config: AdviseConfig, advice: Advice) -> None:
    name = config.model.name if config.trace is None else config.trace.name
    elements = sum(parameter.numel() for parameter in advice.measured.parameters.values())
    world = advice.here
    places = f"{world.ranks} ranks" + (f", {world.per_host} on each host" if world.per_host > 1 else "")
    print(f"{name}, {elements:,} parameters, {places}, {config.optimizer}; measured in {advice.seconds:.0f} s")
    for label in config.labels():
        print(f"NOT REAL: {label}")
    print(advice)
    if config.json:
        write_json(document(config, advice), config.json)
        print(f"predictions  {config.json}")


def document(config: AdviseConfig, advice: Advice) -> dict[str, Any]:
    """All of an advice as JSON has it."""
    computation = advice.measured.computation
    phases = {name: vars(getattr(computation, name)) for name in ("forward", "backward", "optimizer")}
    costs = [
        {"kind": form.__name__, "dtype": str(dtype), "scope": scope, **vars(cost.link), "cores": cost.cores}
        for (form, dtype, scope), cost in advice.measured.costs.items()
    ]
    return {
        "kind": "advise",
        "command": command_line(),
        "environment": environment(),
        "config": dataclasses.asdict(config),
        "labels": config.labels(),
        "computation": phases,
        "arithmetic": {spec: vars(each) for spec, each in advice.measured.arithmetic.items()},
        "network": costs,
        "seconds": advice.seconds,
        "failures": advice.failures,
        "here": _forecast(advice.here),
        "elsewhere": [_forecast(each) for each in advice.elsewhere],
    }


def _forecast(forecast: Forecast) -> dict[str, Any]:
    rows = [
        {
            "compressor": each.spec,
            "order": each.order,
            **vars(each.prediction),
            **dict(zip(("state_bytes", "peak_bytes"), each.memory, strict=True)),
            "tried": each.tried,
            "expected_loss": each.loss,
        }
        for each in forecast.choices
    ]
    best = forecast.best
    recommended = {"compressor": best.spec, "order": best.order, "sentence": forecast.sentence, "line": best.line}
    return {"ranks": forecast.ranks, "ranks_per_host": forecast.per_host, "recommended": recommended, "rows": rows}
