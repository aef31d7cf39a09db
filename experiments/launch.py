"""Ranks on this machine: started together, ended together."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

POLL_SECONDS = 0.5


def under_launcher() -> bool:
    """Whether torchrun, or another launcher that sets its variables, has started this process as a rank."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def chosen_backend(backend: str, nproc: int) -> str:
    """`auto` is NCCL where every local rank can have a GPU, else Gloo."""
    if backend == "auto":
        return "nccl" if dist.is_nccl_available() and torch.cuda.device_count() >= nproc else "gloo"
    if backend == "nccl" and torch.cuda.device_count() < nproc:
        raise ValueError(
            f"nccl needs a GPU a rank: {nproc} ranks, {torch.cuda.device_count()} GPUs here; use --backend gloo"
        )
    return backend


@contextmanager
def joined(backend: str, timeout: timedelta, rendezvous: dict[str, Any] | None = None) -> Iterator[dist.ProcessGroup]:
    """The default process group, from `rendezvous` or a launcher's variables; destroyed at the end."""
    dist.init_process_group(backend, timeout=timeout, **(rendezvous or {}))
    group = dist.group.WORLD
    assert group is not None
    try:
        yield group
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_ranks(function: Callable[..., None], nproc: int, *args: Any) -> None:
    """Run `function(rank, rendezvous, *args)` in `nproc` new processes; `rendezvous` is for `joined`.

    Returns when all have ended. Raises `ProcessRaisedException` or `ProcessExitedException` within seconds of the first
    rank that fails, with its traceback. Whatever happens, no process is left.
    """
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        store = (Path(folder) / "rendezvous").as_uri()
        context = multiprocessing.start_processes(
            _rank, (function, nproc, store, args), nprocs=nproc, join=False, start_method="spawn"
        )
        assert context is not None
        try:
            while not context.join(timeout=POLL_SECONDS):
                pass
        finally:
            for process in context.processes:
                process.kill()
                process.join()


def _rank(rank: int, function: Callable[..., None], nproc: int, store: str, args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a rank that waits inside a collective must end at once, too
    function(rank, {"init_method": store, "rank": rank, "world_size": nproc}, *args)
