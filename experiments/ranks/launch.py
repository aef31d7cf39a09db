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
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from .stopping import dying_with

POLL_SECONDS = 0.5
RENDEZVOUS, FIRST_FAILURE = "rendezvous", "failure"
INTERRUPTED = 130  # the shell's exit code for Ctrl-C


class RankFailure(RuntimeError):
    """A rank raised or died; the message has its traceback, or what ended it."""


def under_launcher() -> bool:
    """Whether torchrun, or another launcher that sets its variables, has started this process as a rank."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that goes, end the block as Ctrl-C does; what nohup has ignored stays so."""
    asked = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    previous = {each: signal.signal(each, _interrupt) for each in asked}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


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


@contextmanager
def joined(backend: str, timeout: timedelta, rendezvous: dict[str, Any] | None = None) -> Iterator[dist.ProcessGroup]:
    """The default process group, from `rendezvous` or a launcher's variables; destroyed at the end.

    A rank that fails keeps its connections while its process lives, so that it can tell why before its peers notice.
    """
    if rendezvous is not None:
        rendezvous["store"].set_timeout(timeout)
    dist.init_process_group(backend, timeout=timeout, **(rendezvous or {}))
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(function: Callable[..., None], nproc: int, *args: Any) -> None:
    """Run `function(rank, rendezvous, *args)` in `nproc` new processes; `rendezvous` is for `joined`.

    Returns when all have ended. Raises RankFailure within seconds of the first rank that fails, and tells of that one.
    Whatever happens, no process is left; on Linux not even where this one is killed.
    """
    others = set(multiprocessing.active_children())
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        try:
            context = multiprocessing.start_processes(
                _rank,
                (function, nproc, Path(folder), os.getpid(), args),
                nprocs=nproc,
                join=False,
                start_method="spawn",
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


def rendezvous_in(folder: Path, rank: int, nproc: int) -> dict[str, Any]:
    """For `joined`: a file in a folder of this machine, of whatever name, through which `nproc` ranks meet."""
    return {"store": dist.FileStore(str(folder / RENDEZVOUS), nproc), "rank": rank, "world_size": nproc}


def _rank(
    rank: int, function: Callable[..., None], nproc: int, folder: Path, parent: int, args: tuple[Any, ...]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which then ends all ranks at once
    dying_with(parent)()  # torch has asked for SIGINT then, which is ignored by now
    try:
        function(rank, rendezvous_in(folder, rank, nproc), *args)
    except Exception:
        with suppress(FileExistsError), (folder / FIRST_FAILURE).open("x", encoding="utf-8") as file:
            file.write(f"rank {rank}:\n{traceback.format_exc()}")
        raise
