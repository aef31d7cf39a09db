"""What to advise on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from ...compress import compressor
from ...hooks.advice import Rule
from ..network import lab as netlab
from ..network.lab import NetlabConfig, backend_here, check_lab
from ..network.link import check_link
from ..results.files import check_file
from ..workloads import emulation
from ..workloads.emulation import Trace, check_dilation, chosen_trace, dilated
from ..workloads.models import ModelConfig


@dataclass(frozen=True)
class AdviseConfig:
    """Measure a training and its network, predict a step of each method and order, and recommend one."""

    nproc: int = 2
    """ranks on this machine (the launcher's own number where one starts the ranks)"""
    backend: Literal["auto", "gloo", "nccl", "gloo-cuda"] = "auto"
    """process group; auto is nccl with a GPU for every rank and neither lab nor emulated link, else gloo;
    gloo-cuda has Gloo carry CUDA tensors, so that ranks can share a GPU"""
    model: ModelConfig = field(default_factory=ModelConfig)
    """gpt, resnet18-cifar, lstm, mlp or torchvision:NAME, and its sizes"""
    batch_size: int = 8
    """samples a rank and step; an emulated accelerator's trace has its own"""
    optimizer: Literal["adamw", "sgd"] = "sgd"
    """sgd has momentum 0.9; what a method costs in loss depends on it"""
    compressors: list[str] = field(default_factory=list)
    """specifications to choose from, separated by commas; if not given, those whose loss was studied"""
    hosts: list[int] = field(default_factory=list)
    """other numbers of hosts to predict steps for, such as 16,64,1024"""
    tolerance: float = Rule.tolerance
    """part of the held-out loss that a method may be expected to cost"""
    worthwhile: float = Rule.worthwhile
    """times as fast that a method must make a step to be worth it"""
    bucket_mb: float | None = None
    """DDP's bucket size, MiB; null is 1 for the first and 25 for the others"""
    compute: str = "real"
    """real, or emulate:TRACE for the layers of a trace instead of the model, taking its time"""
    dilate: float = 1.0
    """what the times of a trace are multiplied by, and the rates of link and netlab divided by"""
    link: str | None = None
    """rate of an emulated link for every rank, such as 100mbit"""
    netlab: NetlabConfig = field(default_factory=NetlabConfig)
    """hosts on this machine behind real limited links"""
    threads: int = 0
    """torch threads a rank; 0 divides the cores among local ranks"""
    timeout: float = 300.0
    """seconds that any wait for other ranks may take"""
    json: str | None = None
    """file to write all predictions to"""
    picture: str | None = None
    """file to draw predicted steps to, by the numbers of hosts (.png, .svg or .pdf)"""

    def __post_init__(self) -> None:
        if self.nproc < 1:
            raise ValueError(f"nproc is at least 1, got {self.nproc}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size is at least 1, got {self.batch_size}")
        if self.threads < 0:
            raise ValueError(f"threads is at least 0, got {self.threads}")
        if too_few := [count for count in self.hosts if count < 2]:
            raise ValueError(f"hosts are at least 2, got {too_few[0]}")
        if self.bucket_mb is not None and not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb is above 0, got {self.bucket_mb}")
        if not self.timeout > 0:
            raise ValueError(f"timeout is above 0, got {self.timeout}")
        for spec in self.compressors:
            compressor(spec)
        _ = self.rule  # checked as it is made
        check_dilation(self.dilate, self.compute)
        _ = self.trace
        check_link(self.link)
        check_lab(self.netlab)
        backend_here(self.backend, self.link, self.netlab.hosts)
        check_file("json", self.json)
        if self.picture and not self.hosts:
            raise ValueError("picture draws steps by the number of hosts: add --hosts 16,64,1024")
        check_file("picture", self.picture)

    @property
    def rule(self) -> Rule:
        """By which one is recommended."""
        return Rule(self.tolerance, self.worthwhile)

    @property
    def trace(self) -> Trace | None:
        """Of the emulated accelerator; None on a real one."""
        return chosen_trace(self.compute)

    @property
    def slowed_link(self) -> str | None:
        """The emulated link, as slow as the dilation makes it."""
        return dilated(self.link, self.dilate) if self.link else None

    @property
    def slowed_netlab(self) -> NetlabConfig:
        """The lab, its links as slow as the dilation makes them."""
        return replace(self.netlab, rate=dilated(self.netlab.rate, self.dilate))

    def labels(self) -> list[str]:
        """What every output says of figures that are not of a real accelerator and network."""
        return emulation.labels(self.trace, self.dilate) + netlab.labels(self.link)
