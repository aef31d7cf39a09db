"""Options of `gradwire compare`."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...compress import compressor
from ..advice.candidates import ANSWERED
from ..network.lab import backend_here
from ..network.link import links_of
from ..results.files import check_folder
from ..workloads.order import BACKWARD
from ..workloads.sharding import TORCH, check_payloads
from ..workloads.training import TrainingConfig


@dataclass(frozen=True)
class CompareConfig(TrainingConfig):
    """Train one model once with each compressor, and compare loss, speed and bytes."""

    simulated: bool = False
    """train all ranks in turn in one process; this gives losses and bytes, but no times. With local_every the ranks are
    sites"""
    checkpoints: str | None = None
    """folder for a checkpoint of the running training, every 100 steps; the same command continues from it. For
    simulated ranks"""
    seeds: int = 1
    """number of seeds, from `seed` on. Several give means of the validation loss with 95 % intervals"""
    compressors: list[str] = field(default_factory=lambda: ["none", *ANSWERED])
    """compressors to compare, separated by commas, such as none,int4,topk:ratio=0.01"""
    turns: bool = True
    """train the compressors in turns of a few steps, so that a change of the host's speed affects all alike. false
    trains one after the other, needs memory for one model only, and gives no verdict"""
    link: str | None = None
    """emulate a network of this bandwidth, such as 100mbit; needs no root. Several are compared one after the
    other: 100mbit,none (none emulates no network)"""
    out: str | None = None
    """folder for results.json, pictures and the report; runs/TIME if not given"""
    logger: list[str] = field(default_factory=list)
    """experiment trackers to log to: wandb, tensorboard"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seeds < 1:
            raise ValueError(f"seeds is at least 1, got {self.seeds}")
        emulated = next(filter(None, self.links), None)
        backend_here(self.backend, emulated, self.netlab.hosts)
        if self.simulated and (emulated or self.netlab.hosts):
            raise ValueError("simulated ranks have no network: leave out link and netlab, or simulated")
        if self.simulated and self.backend not in ("auto", "gloo"):
            raise ValueError(f"simulated ranks train on the CPU, without a process group; got backend {self.backend!r}")
        if self.simulated and (self.ddp != "gradwire" or self.order != BACKWARD):
            raise ValueError("simulated ranks have no DistributedDataParallel: leave out ddp and order, or simulated")
        if self.checkpoints and not self.simulated:
            raise ValueError("checkpoints are of simulated ranks: add simulated, or leave checkpoints out")
        check_folder("checkpoints", self.checkpoints)
        if not self.compressors:
            raise ValueError("compressors is empty: name at least one, such as none,bf16,int4")
        if twice := sorted({spec for spec in self.compressors if self.compressors.count(spec) > 1}):
            raise ValueError(f"compressors names the same one twice: {', '.join(twice)}")
        for spec in self.compressors:
            check_payloads(spec) if self.parallel == "fsdp" else compressor(spec)
        if self.local_every and self.ddp != "gradwire":
            raise ValueError("local SGD trains the bare model: leave out ddp")
        if self.local_every and self.checkpoints:
            raise ValueError("checkpoints are of training without local SGD: leave out local_every or checkpoints")
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
        """True if trainings take turns: that needs several, and nothing under way between steps."""
        return self.turns and len(self.compressors) > 1 and not self.local_every and not self.simulated
