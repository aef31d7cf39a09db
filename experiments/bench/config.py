"""Options of `gradwire bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from ...compress import compressor
from ..results.files import check_file
from ..workloads.emulation import EmulationConfig
from ..workloads.order import BACKWARD, Order
from .models import RESNETS, Task, emulated_task, task
from .rows import NO_DDP, Case

AT_LEAST_ONE = ("batch_size", "image_size", "steps", "warmup")
LISTS = ("models", "ddp", "compressors", "process_groups", "sync_every", "overlap", "order")


@dataclass(frozen=True)
class BenchConfig(EmulationConfig):
    """Seconds a training step with DistributedDataParallel, over models, world sizes and settings."""

    models: list[str] = field(default_factory=lambda: list(RESNETS))
    """models to time: resnet50, resnet101, resnext50_32x4d, resnext101_32x8d, vgg19, gpt-0.9m, gpt-162m, bert, mlp,
    resnet18-cifar, tiny, torchvision:NAME or FILE.py:FUNCTION"""
    batch_size: int = 32
    """samples per rank and step; the trace of an emulated accelerator has its own"""
    image_size: int = 224
    """side of the images in pixels, for models that read images"""
    ddp: list[Literal["torch", "gradwire"]] = field(default_factory=lambda: ["gradwire"])
    """DistributedDataParallel to time; torch,gradwire compares the two"""
    compressors: list[str] = field(default_factory=lambda: ["none"])
    """compressors to time, separated by commas, such as none,int4"""
    bucket_mb: list[float] = field(default_factory=list)
    """DDP's bucket sizes in MiB; if not given, 1 for the first bucket and 25 for the others"""
    process_groups: list[int] = field(default_factory=lambda: [1])
    """numbers of process groups that carry buckets in turn; more than 1 needs gradwire's DistributedDataParallel"""
    sync_every: list[int] = field(default_factory=lambda: [1])
    """average gradients in every k-th iteration only; the other iterations run in no_sync"""
    overlap: list[bool] = field(default_factory=lambda: [True])
    """true sends buckets while backward runs; false holds them until its last gradient"""
    order: list[Order] = field(default_factory=lambda: [BACKWARD])
    """order in which gradients are sent. backward waits for all of them after backward. slices sends pieces of
    --bucket-mb MiB (2 if not given, at most an eighth of the model). priority sends pieces and overlaps them with the
    next forward pass"""
    world_sizes: list[int] = field(default_factory=list)
    """numbers of ranks to time; if not given, 1, 2, 4, ... up to one host, then 1, 2, 4, ... hosts"""
    no_ddp: bool = True
    """true also times one rank without DistributedDataParallel"""
    steps: int = 10
    """number of measured iterations of each setting (with --sync-every, of groups of iterations)"""
    warmup: int = 5
    """number of iterations before the measured ones"""
    seed: int = 0
    """seed of the models and samples"""
    json: str | None = None
    """write all figures to this file"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, got {getattr(self, name)}")
        self._check_lists()
        self.tasks()
        self.cases()
        check_file("json", self.json)

    def _check_lists(self) -> None:
        for name in LISTS:
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: name at least one, or leave it out")
        for name in ("process_groups", "sync_every", "world_sizes"):
            if too_few := [each for each in getattr(self, name) if each < 1]:
                raise ValueError(f"{name} are at least 1, got {too_few[0]}")
        if too_small := [each for each in self.bucket_mb if not each > 0]:
            raise ValueError(f"bucket_mb is above 0, got {too_small[0]}")
        for spec in self.compressors:
            compressor(spec)

    def tasks(self) -> list[Task]:
        """Return the models to train, one after the other."""
        if self.trace is not None:
            return [emulated_task(self.trace, self.dilate)]
        return [task(name, self.image_size) for name in dict.fromkeys(self.models)]

    def cases(self) -> list[Case]:
        """All settings to compare, but for those that there are not. Raises ValueError where none is left."""
        factors: tuple[Sequence[Any], ...] = (
            self.ddp,
            self.compressors,
            self.bucket_mb or (None,),
            self.process_groups,
            self.sync_every,
            self.overlap,
            self.order,
        )
        found = [Case(*values) for values in product(*(dict.fromkeys(each) for each in factors))]
        kept = list(filter(_exists, found))
        if not kept:
            raise ValueError(
                f"torch's DistributedDataParallel takes one process group and backward's order, and orders other than that "
                f"overlap with backward on one process group; got ddp {','.join(self.ddp)}, process_groups "
                f"{self.process_groups}, overlap {self.overlap}, order {','.join(self.order)}"
            )
        return kept

    def cases_on(self, ranks: int) -> list[Case]:
        """The settings to compare on so many ranks; on one of them, no DistributedDataParallel as well."""
        return [NO_DDP, *self.cases()] if ranks == 1 and self.no_ddp else self.cases()


def _exists(case: Case) -> bool:
    """Return True if there is such a setting: torch's DDP has one order and one group, and other orders need overlap."""
    backward = case.order == BACKWARD
    if case.ddp == "torch" and not (backward and case.process_groups == 1):
        return False
    return backward or (case.overlap and case.process_groups == 1)
