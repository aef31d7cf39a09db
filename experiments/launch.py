"""Ranks on this machine: started together, ended together."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

POLL_SECONDS = 0.5
FIRST_FAILURE = "failure"
INTERRUPTED = 130  # the shell's exit code for Ctrl-C


class RankFailure(RuntimeError):
    """A rank raised or died; the message has its traceback, or what ended it."""


def under_launcher() -> bool:
    """Whether torchrun, or another launcher that sets its variables, has started this process as a rank."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does."""
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


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
    """The default process group, from `rendezvous` or a launcher's variables; destroyed at the end.

    A rank that fails keeps its connections while its process lives, so that it can tell why before its peers notice.
    """
    dist.init_process_group(backend, timeout=timeout, **(rendezvous or {}))
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(function: Callable[..., None], nproc: int, *args: Any) -> None:
    """Run `function(rank, rendezvous, *args)` in `nproc` new processes; `rendezvous` is for `joined`.

    Returns when all have ended. Raises RankFailure within seconds of the first rank that fails, and tells of that one.
    Whatever happens, no process is left.
    """
    others = set(multiprocessing.active_children())
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        try:
            context = multiprocessing.start_processes(
                _rank, (function, nproc, Path(folder), args), nprocs=nproc, join=False, start_method="spawn"
            )
            assert context is not None
            while not context.join(timeout=POLL_SECONDS):
                pass
        except multiprocessing.ProcessRaisedException as error:
            first = Path(folder) / FIRST_FAILURE
            raise RankFailure(first.read_text(encoding="utf-8") if first.exists() else error.msg) from error
        except multiprocessing.ProcessExitedException as error:
            if error.signal_name == "SIGINT":  # it came while the rank was starting
                raise KeyboardInterrupt from error
            raise RankFailure(f"rank {error.error_index}: {error.msg}") from error
        finally:
            for process in set(multiprocessing.active_children()) - others:  # of an interrupted start, too
                process.kill()
                process.join()


def supervised(function: Callable[..., None], nproc: int, *args: Any) -> int:
    """`run_ranks` for a command that keeps what has finished: the command's exit code, whatever happens."""
    try:
        with sigterm_interrupts():
            run_ranks(function, nproc, *args)
    except KeyboardInterrupt:
        print("\nstopped; what had finished is kept", file=sys.stderr)
        return INTERRUPTED
    except RankFailure as error:
        print(f"\na rank failed; what had finished before is kept.\n{error}", file=sys.stderr)
        return 1
    return 0


def _rank(rank: int, function: Callable[..., None], nproc: int, folder: Path, args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which then ends all ranks at once
    rendezvous = {"init_method": (folder / "rendezvous").as_uri(), "rank": rank, "world_size": nproc}
    try:
        function(rank, rendezvous, *args)
    except Exception:
        with suppress(FileExistsError), (folder / FIRST_FAILURE).open("x", encoding="utf-8") as file:
            file.write(f"rank {rank}:\n{traceback.format_exc()}")
        raise
