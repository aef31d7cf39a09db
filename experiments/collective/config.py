"""What `gradwire collective` measures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import torch

from ...ddp_core import LEAST_TORCH
from ..network.lab import NetlabConfig, backend_here, check_lab
from ..results.files import check_file
from ..results.sizes import elements_of

Operation: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True)
class CollectiveConfig:
    """Move a number of elements over ranks in pieces of each size: all start at once, then all are awaited."""

    nproc: int = 2
    """number of ranks on this host; a launcher such as torchrun decides itself"""
    backend: Literal["auto", "gloo", "nccl", "gloo-cuda", "gradwire"] = "auto"
    """process group; auto takes nccl if every rank has a GPU and nothing is emulated, else gloo; gloo-cuda lets
    ranks share a GPU"""
    against: list[Literal["gloo", "gradwire"]] = field(default_factory=list)
    """further process groups to compare with, in turns (CPU only)"""
    operations: list[Operation] = field(default_factory=lambda: ["all_reduce"])
    """collectives to time"""
    elements: list[str] = field(default_factory=lambda: ["1k", "10k", "100k", "1M", "10M"])
    """sizes of one message, in float32 numbers: of one rank, or of all ranks for all-gather, reduce-scatter and
    all-to-all"""
    total: str = "60M"
    """float32 numbers in all messages of a size together"""
    pieces: int = 0
    """number of messages of each size; 0 takes as many as the total allows"""
    repeats: int = 3
    """number of repeats of each measurement"""
    netlab: NetlabConfig = field(default_factory=NetlabConfig)
    """emulated hosts on one host"""
    threads: int = 1
    """torch threads per rank"""
    timeout: float = 300.0
    """longest wait for another rank, in seconds"""
    json: str | None = None
    """write all figures to this file"""

    def __post_init__(self) -> None:
        for name in ("nproc", "repeats", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, got {getattr(self, name)}")
        if not self.timeout > 0:
            raise ValueError(f"timeout is above 0, got {self.timeout}")
        check_lab(self.netlab)
        backend_here(self.backend, hosts=self.netlab.hosts)
        self._check_backends()
        self._check_pieces()
        check_file("json", self.json)

    def _check_backends(self) -> None:
        version = tuple(int(part) for part in torch.__version__.split(".")[:2])
        if "gradwire" in (self.backend, *self.against) and version < LEAST_TORCH:
            needed = ".".join(map(str, LEAST_TORCH))
            raise ValueError(f"the backend gradwire needs torch {needed} or later, and this is {torch.__version__}")
        if self.against and self.backend in ("nccl", "gloo-cuda"):
            raise ValueError(f"against is of process groups on the CPU, and {self.backend} is not: leave one out")

    def _check_pieces(self) -> None:
        if not self.elements:
            raise ValueError("elements is empty: name at least one size, such as 1k or 1M")
        if not self.operations:
            raise ValueError(f"operations is empty: name at least one of {', '.join(get_args(Operation))}")
        if self.pieces < 0:
            raise ValueError(f"pieces is at least 1, or 0 for as many as make up the total; got {self.pieces}")
        total = elements_of(self.total)
        for size in self.elements:
            if elements_of(size) > total and not self.pieces:
                raise ValueError(f"a piece of {size} is larger than the total of {self.total}")
