"""Options of every command that starts ranks and measures what goes between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .lab import NetlabConfig, check_lab


@dataclass(frozen=True)
class RanksConfig:
    """The number of ranks, their process group, and their time limit."""

    nproc: int = 2
    """number of ranks on this host; a launcher such as torchrun decides itself"""
    backend: Literal["auto", "gloo", "nccl", "gloo-cuda"] = "auto"
    """process group; auto takes nccl if every rank has a GPU and nothing is emulated, else gloo; gloo-cuda lets
    ranks share a GPU"""
    netlab: NetlabConfig = field(default_factory=NetlabConfig)
    """emulated hosts on one host"""
    threads: int = 0
    """torch threads per rank; 0 divides the cores among the ranks"""
    timeout: float = 300.0
    """longest wait for another rank, in seconds"""

    def __post_init__(self) -> None:
        if self.nproc < 1:
            raise ValueError(f"nproc is at least 1, got {self.nproc}")
        if self.threads < 0:
            raise ValueError(f"threads is at least 0, got {self.threads}")
        if not self.timeout > 0:
            raise ValueError(f"timeout is above 0, got {self.timeout}")
        check_lab(self.netlab)
