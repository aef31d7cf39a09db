"""The kinds of backends that process groups have for devices: the one place that decides by a backend's name."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

BY_HOST = ("gloo", "mpi")  # whoever waits for their collectives on a GPU is the host; all others order streams


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that carries a group's tensors on a device."""
    return str(group._get_backend(device).name()).lower()


def orders_streams(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if streams wait for a group's replies on a device, and the host never does: NCCL, and others of GPUs."""
    return device.type == "cuda" and backend_name(group, device) not in BY_HOST


def register_alike(
    group: dist.ProcessGroup, parent: dist.ProcessGroup, device: torch.device, store: dist.Store, timeout: timedelta
) -> None:
    """Give a new group a backend for a device: on GPUs the parent's kind, on the CPU Gloo.

    Raises RuntimeError for a kind that it cannot make, since another one would carry gradients elsewhere.
    """
    rank, size, types = group.rank(), group.size(), dist.ProcessGroup.BackendType
    kind = backend_name(parent, device) if device.type == "cuda" else "gloo"
    if kind == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group._register_backend(device, types.NCCL, dist.ProcessGroupNCCL(store, rank, size, options))
    elif kind == "gloo":
        group._register_backend(device, types.GLOO, dist.ProcessGroupGloo(store, rank, size, timeout))
    else:
        raise RuntimeError(
            f"gradwire needs a process group of its own for {device.type} tensors, and makes such groups of NCCL and Gloo; "
            f"the model's group has {kind} there. Call init_process_group('cpu:gloo,cuda:nccl'); without "
            "hosts+ in the compressor, training needs no such group"
        )
