"""The process group and the device of a host's ranks."""

from __future__ import annotations

import os
from typing import Literal

import torch
import torch.distributed as dist

ON_GPUS = ("nccl", "gloo-cuda")  # the latter carries CUDA tensors by Gloo, so that ranks can share a GPU


def chosen_backend(backend: str, nproc: int) -> str:
    """`auto` is NCCL where every local rank can have a GPU, else Gloo."""
    if backend == "auto":
        return "nccl" if dist.is_nccl_available() and torch.cuda.device_count() >= nproc else "gloo"
    if backend == "nccl" and torch.cuda.device_count() < nproc:
        raise ValueError(
            f"nccl needs a GPU per rank: {nproc} ranks, {torch.cuda.device_count()} GPUs here; use --backend gloo, or "
            "gloo-cuda, with which ranks share GPUs"
        )
    if backend == "gloo-cuda" and not torch.cuda.is_available():
        raise ValueError("gloo-cuda trains on GPUs, and torch sees none here; use --backend gloo")
    return backend


def device_of(backend: str) -> Literal["cpu", "cuda"]:
    """Return the kind of device: GPUs with NCCL and gloo-cuda, the CPU with Gloo."""
    return "cuda" if backend in ON_GPUS else "cpu"


def device_here(backend: str, rank: int = 0) -> torch.device:
    """This rank's device; a GPU is made the current one. Where there are more ranks than GPUs, they share them.

    `rank`: its number on this host, without a launcher.
    """
    if device_of(backend) == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def unused_gpus(backend: str) -> str | None:
    """Return a warning of GPUs that the ranks do not use; None if they use them or if there are none."""
    count = torch.cuda.device_count()
    if not count or device_of(backend) == "cuda":
        return None
    return (
        f"{count} GPU{'s' if count > 1 else ''} here and not used: with {backend} the ranks train on the CPU. --backend "
        "nccl needs a GPU for each rank of this host, and no lab or emulated link. With gloo-cuda ranks share GPUs"
    )


def shared_gpus(backend: str, nproc: int) -> str | None:
    """Return a warning of ranks that share GPUs; None if each has its own."""
    count = torch.cuda.device_count()
    if backend != "gloo-cuda" or nproc <= count:
        return None
    return (
        f"{nproc} ranks share {count} GPU{'s' if count > 1 else ''}, and the host waits for Gloo: losses and bytes are "
        "right, but step times are not those of ranks with a GPU each"
    )
