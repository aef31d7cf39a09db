"""What `gradwire compare` is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from ...compress import compressor
from ...hooks.advice.decisions import ANSWERED
from ..network.lab import backend_here
from ..network.link import links_of
from ..network.ranks_config import RanksConfig
from ..workloads.data import DataConfig
from ..workloads.models import ModelConfig
from ..workloads.optimizers import OptimizerName
from ..workloads.order import BACKWARD, Order
from ..workloads.sharding import TORCH, check_payloads
from ..workloads.training import TrainingConfig


@dataclass(frozen=True)
class CompareConfig(RanksConfig):
    """Train one model once with each compressor, and compare loss, speed and bytes."""

    simulated: bool = False
    """train all ranks in turn in one process; this gives losses and bytes, but no times"""
    model: ModelConfig = field(default_factory=ModelConfig)
    """model to train, and its sizes"""
    data: DataConfig = field(default_factory=DataConfig)
    """data set to train on"""
    compressors: list[str] = field(default_factory=lambda: ["none", *ANSWERED])
    """compressors to compare, separated by commas, such as none,int4,topk:ratio=0.01"""
    steps: int = 100
    """number of batches per rank for each compressor"""
    sync_every: int = 1
    """number of batches whose gradients are accumulated for one optimizer step; only the last one communicates"""
    batch_size: int = 8
    """samples per rank and batch"""
    optimizer: OptimizerName = "sgd"
    """optimizer, the same for all compressors; muon is for the matrices of gpt's blocks, with adamw beside it"""
    lr: float = 0.1
    """learning rate"""
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
    local_outer: str = "nesterov:lr=0.7,momentum=0.9"
    """outer optimizer of local SGD, such as sgd:lr=1,momentum=0"""
    order: Order = BACKWARD
    """order in which gradients are sent. backward waits for all of them after backward. slices sends pieces of at
    most 2 MiB. priority sends pieces and overlaps them with the next forward pass. auto chooses"""
    turns: bool = True
    """train the compressors in turns of a few steps, so that a change of the host's speed affects all alike. false
    trains one after the other, needs memory for one model only, and gives no verdict"""
    eval_batches: int = 40
    """number of validation batches at the end"""
    link: str | None = None
    """emulate a network of this bandwidth, such as 100mbit; needs no root. Several are compared one after the
    other: 100mbit,none (none emulates no network)"""
    out: str | None = None
    """folder for results.json, pictures and the report; runs/TIME if not given"""
    logger: list[str] = field(default_factory=list)
    """experiment trackers to log to: wandb, tensorboard"""

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
            raise ValueError("compressors is empty: name at least one, such as none,bf16,int4")
        if twice := sorted({spec for spec in self.compressors if self.compressors.count(spec) > 1}):
            raise ValueError(f"compressors names the same one twice: {', '.join(twice)}")
        for spec in self.compressors:
            check_payloads(spec) if self.parallel == "fsdp" else compressor(spec)
        if self.local_every and (self.simulated or self.ddp != "gradwire"):
            raise ValueError("local SGD trains the bare model, on ranks of its own: leave out ddp and simulated")
        if self.parallel == "fsdp" and (self.simulated or self.order != BACKWARD or self.ddp != "gradwire"):
            raise ValueError(
                "ddp, order and simulated are of DistributedDataParallel: leave them out with parallel fsdp"
            )
        if self.parallel == "fsdp" and emulated and TORCH in self.compressors:
            raise ValueError(f"an emulated link delays gradwire's messages, not {TORCH}: leave that out, or use a lab")

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
