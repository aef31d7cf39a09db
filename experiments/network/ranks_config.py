"""Options of every command that starts ranks and measures what goes between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .lab import NetlabConfig, check_lab


@dataclass(frozen=True)
class RanksConfig:
    """How many ranks there are, what joins them, and how long they wait for each other."""

    nproc: int = 2
    """ranks on this machine (the launcher's own number where one starts the ranks)"""
    backend: Literal["auto", "gloo", "nccl", "gloo-cuda"] = "auto"
    """process group; auto is nccl with a GPU for every rank and neither lab nor emulated link, else gloo;
    gloo-cuda has Gloo carry CUDA tensors, so that ranks can share a GPU"""
    netlab: NetlabConfig = field(default_factory=NetlabConfig)
    """hosts on this machine, joined by links of a set rate, in place of nproc ranks"""
    threads: int = 0
    """torch threads a rank; 0 divides the cores among local ranks"""
    timeout: float = 300.0
    """seconds that any wait for other ranks may take"""

    def __post_init__(self) -> None:
        if self.nproc < 1:
            raise ValueError(f"nproc is at least 1, got {self.nproc}")
        if self.threads < 0:
            raise ValueError(f"threads is at least 0, got {self.threads}")
        if not self.timeout > 0:
            raise ValueError(f"timeout is above 0, got {self.timeout}")
        check_lab(self.netlab)
