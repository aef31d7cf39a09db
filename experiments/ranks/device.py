"""Which process group the ranks of a machine get, and on which device they train."""

from __future__ import annotations

import os
from typing import Literal

import torch
import torch.distributed as dist


def chosen_backend(backend: str, nproc: int) -> str:
    """`auto` is NCCL where every local rank can have a GPU, else Gloo."""
    if backend == "auto":
        return "nccl" if dist.is_nccl_available() and torch.cuda.device_count() >= nproc else "gloo"
    if backend == "nccl" and torch.cuda.device_count() < nproc:
        raise ValueError(
            f"nccl needs a GPU a rank: {nproc} ranks, {torch.cuda.device_count()} GPUs here; use --backend gloo"
        )
    return backend


def device_of(backend: str) -> Literal["cpu", "cuda"]:
    """Where the ranks of a process group train: on GPUs with NCCL, on the CPU with Gloo."""
    return "cuda" if backend == "nccl" else "cpu"


def device_here(backend: str) -> torch.device:
    """This rank's device; a GPU is made the current one."""
    if device_of(backend) == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def unused_gpus(backend: str) -> str | None:
    """What to tell a user whose GPUs the ranks do without; None where they use them, and where there are none."""
    count = torch.cuda.device_count()
    if not count or device_of(backend) == "cuda":
        return None
    return (
        f"{count} GPU{'s' if count > 1 else ''} here and not used: with {backend} the ranks train on the CPU; --backend "
        "nccl takes a GPU for every rank of this machine, and neither lab nor emulated link"
    )
