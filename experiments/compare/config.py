"""What `gradwire compare` is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from ...compress import compressor
from ..network.lab import backend_here
from ..network.link import links_of
from ..network.ranks_config import RanksConfig
from ..workloads.data import DataConfig
from ..workloads.models import ModelConfig
from ..workloads.order import BACKWARD, Order
from ..workloads.sharding import TORCH, check_payloads
from ..workloads.training import TrainingConfig


@dataclass(frozen=True)
class CompareConfig(RanksConfig):
    """Train one model once with each compressor, and compare loss, speed and bytes."""

    simulated: bool = False
    """train the nproc ranks in turn, in one process: their losses and bytes, without a network and its times"""
    model: ModelConfig = field(default_factory=ModelConfig)
    """gpt, resnet18-cifar, lstm, mlp or torchvision:NAME, and its sizes"""
    data: DataConfig = field(default_factory=DataConfig)
    """text, digits, patterns, mnist or cifar10, and where it lies"""
    compressors: list[str] = field(default_factory=lambda: ["none", "bf16", "int4", "powersgd:rank=8,payload=int8"])
    """specifications, separated by commas: none,powersgd:rank=1,topk:ratio=0.01"""
    steps: int = 100
    """batches of a rank for each compressor"""
    sync_every: int = 1
    """batches whose mean gradient makes an optimizer step; only the last of them communicates"""
    batch_size: int = 8
    """samples a rank and step"""
    optimizer: Literal["adamw", "sgd"] = "sgd"
    """the same for all compressors"""
    lr: float = 0.1
    """learning rate"""
    momentum: float = 0.5
    """of sgd"""
    schedule: Literal["constant", "cosine"] = "constant"
    """of the learning rate after its warm-up; cosine ends at zero"""
    warmup: int = 0
    """optimizer steps in which the learning rate grows to lr"""
    seed: int = 0
    """of the initial model and the order of samples"""
    bucket_mb: float | None = None
    """DDP's bucket size, MiB; null is 1 for the first and 25 for the others"""
    ddp: Literal["gradwire", "torch"] = "gradwire"
    """whose DistributedDataParallel; torch's has gradwire's hook"""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """what trains it; with fsdp (torch's FSDP2) compressors are WEIGHTS/GRADIENTS, such as int8/int4, one word for both, or
    torch for its own communication"""
    local_every: int = 0
    """optimizer steps between two averages by local steps (gradwire.LocalSteps), which train the bare model and average
    differences, compressed; 0 averages the gradients of every step"""
    local_outer: str = "nesterov:lr=0.7,momentum=0.9"
    """the outer optimizer of local steps, such as sgd:lr=1,momentum=0"""
    order: Order = BACKWARD
    """in which gradients go: backward, whose step waits for all of them; slices, the same in pieces of 2 MiB at most on the
    wire; priority: in pieces, first what the next forward needs first, and that waits where it needs them; auto"""
    turns: bool = True
    """train the compressors in turns of a few steps, so that a change of the machine's speed hits all alike. Memory then
    holds all their models at once. false trains one after the other, without a verdict. Local steps and simulated ranks
    take no turns"""
    eval_batches: int = 40
    """held-out batches at the end"""
    link: str | None = None
    """rate of an emulated link, such as 100mbit: what gradwire sends is held back as if by it; needs no root. Several,
    separated by commas, are compared one after the other; none is no emulated link: 100mbit,none"""
    out: str | None = None
    """folder for results.json, pictures and report; runs/<time> if not given"""
    logger: list[str] = field(default_factory=list)
    """wandb, tensorboard"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.training  # checked as it is made
        emulated = next(filter(None, self.links), None)
        backend_here(self.backend, emulated, self.netlab.hosts)
        if self.simulated and (emulated or self.netlab.hosts):
            raise ValueError("simulated ranks have no network: leave out link and netlab, or simulated")
        if self.simulated and self.backend not in ("auto", "gloo"):
            raise ValueError(f"simulated ranks train on the CPU, without a process group; got backend {self.backend!r}")
        if self.simulated and (self.ddp != "gradwire" or self.order != BACKWARD):
            raise ValueError("simulated ranks have no DistributedDataParallel: leave out ddp and order, or simulated")
        if not self.compressors:
            raise ValueError("compressors is empty: name at least one, such as none,bf16,powersgd:rank=4")
        if twice := sorted({spec for spec in self.compressors if self.compressors.count(spec) > 1}):
            raise ValueError(f"compressors names the same one twice: {', '.join(twice)}")
        for spec in self.compressors:
            check_payloads(spec) if self.parallel == "fsdp" else compressor(spec)
        if self.local_every and (self.simulated or self.ddp != "gradwire"):
            raise ValueError("local steps train the bare model, on ranks of their own: leave out ddp and simulated")
        if self.parallel == "fsdp" and (self.simulated or self.order != BACKWARD or self.ddp != "gradwire"):
            raise ValueError(
                "ddp, order and simulated are of DistributedDataParallel: leave them out with parallel fsdp"
            )
        if self.parallel == "fsdp" and emulated and TORCH in self.compressors:
            raise ValueError(
                f"an emulated link holds back what gradwire sends, not {TORCH}: leave that out, or use a lab"
            )

    @property
    def links(self) -> tuple[str | None, ...]:
        """The emulated links to compare on; None is no emulated link."""
        return links_of(self.link)

    @property
    def in_turns(self) -> bool:
        """Whether trainings take turns: it needs another one, and nothing under way between steps."""
        return self.turns and len(self.compressors) > 1 and not self.local_every and not self.simulated

    @property
    def training(self) -> TrainingConfig:
        """What all compressors share: the options of one training."""
        return TrainingConfig(**{each.name: getattr(self, each.name) for each in fields(TrainingConfig)})
