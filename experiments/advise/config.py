"""What to advise on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ...compress import compressor
from ...hooks.advice import Rule
from ...hooks.advice.trials import TRIAL_SECONDS, checked_seconds
from ..results.files import check_file
from ..workloads.emulation import EmulationConfig
from ..workloads.models import ModelConfig


@dataclass(frozen=True)
class AdviseConfig(EmulationConfig):
    """Measure a training and its network, predict a step of each compressor and order, and recommend one."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """model to train, and its sizes"""
    batch_size: int = 8
    """samples per rank and step; the trace of an emulated accelerator has its own"""
    optimizer: Literal["adamw", "sgd"] = "sgd"
    """optimizer (sgd has momentum 0.9); the loss that a compressor costs depends on it"""
    compressors: list[str] = field(default_factory=list)
    """compressors to choose from, separated by commas; if not given, those whose loss was studied"""
    hosts: list[int] = field(default_factory=list)
    """also predict the step time on these numbers of hosts, such as 16,64,1024"""
    tolerance: float = Rule.tolerance
    """largest relative increase of the validation loss that a compressor may cost"""
    worthwhile: float = Rule.worthwhile
    """minimum speed-up over none and bf16 to recommend a compressor"""
    trial_seconds: float = TRIAL_SECONDS
    """about how many seconds to spend on real steps with the recommended compressor; 0 only predicts"""
    bucket_mb: float | None = None
    """DDP's bucket size in MiB; null gives 1 for the first bucket and 25 for the others"""
    json: str | None = None
    """write all predictions to this file"""
    picture: str | None = None
    """draw the predicted step times by number of hosts to this file (.png, .svg or .pdf)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size < 1:
            raise ValueError(f"batch_size is at least 1, got {self.batch_size}")
        if too_few := [count for count in self.hosts if count < 2]:
            raise ValueError(f"hosts are at least 2, got {too_few[0]}")
        if self.bucket_mb is not None and not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb is above 0, got {self.bucket_mb}")
        for spec in self.compressors:
            compressor(spec)
        _ = self.rule  # checked as it is made
        checked_seconds(self.trial_seconds)
        check_file("json", self.json)
        if self.picture and not self.hosts:
            raise ValueError("picture draws steps by the number of hosts: add --hosts 16,64,1024")
        check_file("picture", self.picture)

    @property
    def rule(self) -> Rule:
        """By which one is recommended."""
        return Rule(self.tolerance, self.worthwhile)
