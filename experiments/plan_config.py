"""The options of `gradwire plan`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from ..compress import compressor
from .ddp_step import Cluster
from .network.link import parse_rate
from .sharded_plan import Policy
from .workloads.data import DATA
from .workloads.models import ModelConfig
from .workloads.optimizers import OptimizerName
from .workloads.sharding import TORCH, check_payloads

BUSES = {"pcie3x16": "126gbit", "pcie4x16": "252gbit", "pcie5x16": "504gbit"}  # 16 lanes of 8, 16, 32 GT/s, 128b/130b
OF_DDP, OF_FSDP = ("none", "bf16", "int8", "int4"), (TORCH, "bf16", "int8", "int8/int4", "int4")
OF_HOSTS = ("hosts+bf16", "hosts+int8", "hosts+int4")  # where ranks share a host's network card
MOST_PARAMETERS = 10**13
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COUNT = re.compile(r"(\d+\.?\d*(?:e\d+)?)([kmbt]?)", re.IGNORECASE)
THOUSANDS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True)
class PlanConfig:
    """Bytes a step and compression ratio of each compressor, from a dry run that needs no memory."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """model to plan for, and its sizes"""
    data: str | None = None
    """data set whose shapes the model is built for: text, packages, digits, patterns, mnist or cifar10; that of
    the model's paper if not given"""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """ddp, or fsdp for torch's FSDP2; with fsdp a compressor is WEIGHTS/GRADIENTS such as int8/int4, or one word for
    both"""
    compressors: list[str] = field(default_factory=lambda: list(OF_DDP))
    """compressors to plan for, separated by commas; with fsdp torch,bf16,int8,int8/int4,int4 if not given (torch
    is FSDP2 by itself), and hosts+ ones where GPUs share a host"""
    workers: int = 8
    """number of ranks; each is a host of its own, but with --bus, where all are in one box"""
    hosts: int = 0
    """number of hosts, in place of --workers"""
    gpus_per_host: int = 1
    """with --hosts: GPUs of a host, whose ranks share its network card"""
    rate: str | None = None
    """bandwidth of a host's network card, such as 10gbit; adds the most that each compressor can save"""
    micro_batches: int = 1
    """with --step-seconds: micro-batches that a step accumulates; the last one alone sends gradients, and with fsdp
    each sends weights"""
    dtype: str | None = None
    """dtype of the gradients: fp32, bf16 or fp16; by default with ddp that of a model of your file, else fp32. 16 bits
    halve the bytes of none. With fsdp also of the weights that are sent, or WEIGHTS/GRADIENTS such as bf16/fp32, as with
    MixedPrecisionPolicy(param_dtype=torch.bfloat16) from torch 2.15 on"""
    optimizer: OptimizerName | None = None
    """sets the error feedback that compressors leave open, and adds the memory of a rank; muon is for gpt and
    --parameters, and with fsdp adds the bytes of its step"""
    gpu_memory: float | None = None
    """with fsdp: memory of a GPU in GB, such as 80; DDP and hybrid sharding are not recommended if they need more
    before activations"""
    bucket_mb: float | None = None
    """DDP's bucket size in MiB; null gives 1 for the first bucket and 25 for the others"""
    local_every: int = 0
    """average the models every N optimizer steps by local SGD and spread its bytes over them; 0 averages the
    gradients of every step"""
    bus: str | None = None
    """bandwidth of a bus that all ranks of a host share: pcie3x16, pcie4x16, pcie5x16, or a rate such as 100gbit;
    adds the computed time of a step's bytes on it"""
    sites: int = 0
    """number of sites that train by local SGD (LocalSteps); predicts for each compressor how often they can average"""
    up: str = "100mbit"
    """with --sites: bandwidth from a site to the others"""
    down: str | None = None
    """with --sites: bandwidth to a site; that of --up if not given"""
    round_trip_ms: float = 60.0
    """with --sites: milliseconds of a round trip between two sites; with --relay between a site and the relay"""
    relay: bool = False
    """with --sites: payloads go through gradwire rendezvous --relay"""
    step_seconds: float | None = None
    """seconds that a step computes, with all its micro-batches; with --rate or --bus adds the step of each compressor;
    with --sites 1 if not given"""
    computing: float = 0.95
    """with --sites: share of the time that sites should compute"""
    parameters: str | None = None
    """number of a model's parameters, such as 124M or 72.7e9, in the layers of a transformer, in place of --model"""
    json: bool = False
    """print JSON instead of a table"""

    def __post_init__(self) -> None:
        if self.data is not None and self.data not in DATA:
            raise ValueError(f"unknown data {self.data!r}; there are: {', '.join(DATA)}")
        if self.workers < 1:
            raise ValueError(f"--workers is at least 1, got {self.workers}")
        if self.bucket_mb is not None and not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb is above 0, got {self.bucket_mb}")
        if self.local_every < 0:
            raise ValueError(f"local_every is at least 1, or 0 for the gradients of every step; got {self.local_every}")
        if self.bus is not None and not parse_rate(BUSES.get(self.bus, self.bus)) > 0:
            raise ValueError(f"bus is {', '.join(BUSES)} or a rate above 0 such as 100gbit, got {self.bus!r}")
        if self.sites == 1 or self.sites < 0 or not 0 < self.computing < 1:
            raise ValueError(
                f"--sites is at least 2 and --computing between 0 and 1; got {self.sites} and {self.computing}"
            )
        if self.step_seconds is not None and not self.step_seconds > 0:
            raise ValueError(f"--step-seconds is above 0, got {self.step_seconds}")
        if not self.round_trip_ms >= 0 or not all(parse_rate(rate) > 0 for rate in (self.up, self.down or self.up)):
            raise ValueError("--round-trip-ms is not negative, and --up and --down are rates above 0 such as 100mbit")
        if self.parameters is not None and not 1 <= counted(self.parameters) <= MOST_PARAMETERS:
            raise ValueError(f"--parameters is from 1 to {MOST_PARAMETERS:.0e}, got {self.parameters}")
        if self.parameters is not None and self.model != ModelConfig():
            raise ValueError(
                f"--parameters is in place of --model: leave one out, got {self.parameters} and {self.model.name}"
            )
        if self.optimizer == "muon" and self.parameters is None and self.model.family != "gpt":
            raise ValueError(f"optimizer muon is for gpt and --parameters, and the model is {self.model.name}")
        if self.optimizer is not None and (self.sites or self.local_every):
            raise ValueError("--optimizer is of gradients that are averaged in each step: leave it out of local SGD")
        if self.gpu_memory is not None and not (self.parallel == "fsdp" and self.gpu_memory > 0):
            raise ValueError(f"--gpu-memory is in GB, above 0, and goes with --parallel fsdp; got {self.gpu_memory}")
        if self.sites and (self.parallel == "fsdp" or self.local_every or self.timed):
            raise ValueError(
                "--sites plans local SGD between sites: leave out --parallel, --local-every, --rate, --bus"
            )
        self._check_cluster()
        if not self.compressors:
            raise ValueError("compressors is empty: name at least one, such as none,bf16,int4")
        if self.parallel == "fsdp" and (self.bucket_mb is not None or self.local_every):
            raise ValueError("bucket_mb and local_every are of ddp: leave them out with parallel fsdp")
        for spec in self.specs:
            check_payloads(spec) if self.parallel == "fsdp" else compressor(spec)

    def _check_cluster(self) -> None:
        if self.hosts < 0 or self.gpus_per_host < 1 or self.micro_batches < 1:
            raise ValueError(
                "--hosts is 0 or more, and --gpus-per-host and --micro-batches are at least 1; got "
                f"{self.hosts}, {self.gpus_per_host} and {self.micro_batches}"
            )
        if self.rate is not None and not parse_rate(self.rate) > 0:
            raise ValueError(f"--rate is a bandwidth above 0 such as 10gbit, got {self.rate!r}")
        if self.rate is not None and self.cluster.hosts == 1:
            raise ValueError(
                f"--rate={self.rate} is of the network between hosts, and there is one host: leave it out, and for several "
                "GPUs add --bus, such as --bus pcie4x16"
            )
        if self.gpus_per_host > 1 and not self.hosts:
            raise ValueError(f"--gpus-per-host={self.gpus_per_host} goes with --hosts: name how many hosts there are")
        named = self.dtypes
        if not set(named) <= DTYPES.keys() or len(named) > 1 + (self.parallel == "fsdp"):
            raise ValueError(
                f"--dtype is {', '.join(DTYPES)}, or with --parallel fsdp WEIGHTS/GRADIENTS such as bf16/fp32; got "
                f"{self.dtype!r}"
            )
        if self.hosts and self.workers not in (PlanConfig.workers, self.ranks):
            raise ValueError(
                f"--workers={self.workers} is not the ranks of {self.hosts} hosts: leave it out and give --gpus-per-host"
            )
        if self.step_seconds is not None and not (self.timed or self.sites or self.local_every):
            raise ValueError("--step-seconds goes with a network: add --rate, --bus or --sites")
        if self.micro_batches > 1 and self.step_seconds is None:
            raise ValueError(
                "--micro-batches goes with --step-seconds, the seconds that one GPU computes in a step with all of them"
            )
        if self.local_every and (self.rate is not None or self.step_seconds is not None):
            raise ValueError("--local-every averages models now and then: leave out --rate and --step-seconds")

    @property
    def subject(self) -> str:
        """The name of the model."""
        return self.model.name if self.parameters is None else f"a transformer of {self.parameters}"

    @property
    def policy(self) -> Policy:
        """The dtypes that are sent."""
        weights, gradients = DTYPES[self.dtypes[0]], DTYPES[self.dtypes[-1]]
        return Policy(weights, gradients)

    @property
    def dtypes(self) -> list[str]:
        """The names of the dtypes of weights and gradients, or of both."""
        return (self.dtype or "fp32").split("/")

    @property
    def specs(self) -> Sequence[str]:
        """The compressors to plan for."""
        if tuple(self.compressors) != OF_DDP:
            return self.compressors
        return (OF_FSDP if self.parallel == "fsdp" else OF_DDP) + OF_HOSTS * self.shared_card

    @property
    def shared_card(self) -> bool:
        """True if several ranks of a host share its network card."""
        return self.gpus_per_host > 1 and self.hosts > 1

    @property
    def advised(self) -> bool:
        """True if the plan ends with a recommendation."""
        return (self.hosts > 1 or self.box) and not self.local_every

    @property
    def beside_ddp(self) -> bool:
        """True if DDP is planned beside FSDP2: where it may be recommended, and where Muon's step sends much."""
        return self.parallel == "fsdp" and (self.optimizer == "muon" or self.advised)

    @property
    def box(self) -> bool:
        """True if all ranks share the bus of one host."""
        return self.bus is not None and self.hosts < 2 and self.ranks > 1

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.hosts * self.gpus_per_host or self.workers

    @property
    def timed(self) -> bool:
        """True if the time of a step's bytes is asked for."""
        return self.rate is not None or self.bus is not None

    @property
    def cluster(self) -> Cluster:
        """The hosts and what their ranks share."""
        box = self.bus is not None and not self.hosts
        hosts, gpus = (1, self.workers) if box else (self.hosts or self.workers, self.gpus_per_host)
        card = float("inf") if self.rate is None else parse_rate(self.rate)
        bus = float("inf") if self.bus is None else parse_rate(BUSES.get(self.bus, self.bus)) / gpus
        return Cluster(hosts, gpus, card, bus)


def counted(text: str) -> int:
    """Return a number of parameters.

    >>> counted("124M"), counted("1.2B"), counted("72.7e9"), counted("1000")
    (124000000, 1200000000, 72700000000, 1000)
    """
    match = COUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"--parameters is a number such as 124M, 1.2B or 72.7e9, got {text!r}")
    return round(float(match[1]) * THOUSANDS[match[2].lower()])
