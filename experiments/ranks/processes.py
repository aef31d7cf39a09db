"""Ranks on this host: started together, ended together."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.multiprocessing as multiprocessing

from .group import rendezvous_in
from .own_command import safe_path
from .stopping import INTERRUPTED, killed_with, sigterm_interrupts

POLL_SECONDS = 0.5
FIRST_FAILURE = "failure"


class RankFailure(RuntimeError):
    """A rank raised or died; the message has its traceback, or what ended it."""


def run_ranks(function: Callable[..., None], nproc: int, *args: Any) -> None:
    """Run `function(rank, rendezvous, *args)` in `nproc` new processes; `rendezvous` is for `joined`.

    Returns when all have ended. Raises RankFailure within seconds of the first rank that fails, with its error.
    Whatever happens, no process is left; on Linux not even where this one is killed.
    """
    others = set(multiprocessing.active_children())
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        try:
            with safe_path():
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
            told = first.read_text(encoding="utf-8") if first.exists() else error.msg
            raise RankFailure("\n\n".join([*_killed(context.processes), told])) from error
        except multiprocessing.ProcessExitedException as error:
            if error.signal_name == "SIGINT":  # it came while the rank was starting
                raise KeyboardInterrupt from error
            raise RankFailure(f"rank {error.error_index}: {error.msg}") from error
        finally:
            for process in set(multiprocessing.active_children()) - others:  # of an interrupted start, too
                process.kill()
                process.join()


def _killed(processes: Sequence[BaseProcess]) -> Iterator[str]:
    """Yield a line for each rank that was killed: other ranks may have raised errors for want of it."""
    for rank, process in enumerate(processes):
        if process.exitcode == -signal.SIGKILL:
            yield f"rank {rank}: process {rank} terminated with signal SIGKILL"


def supervised(function: Callable[..., None], nproc: int, *args: Any) -> int:
    """`run_ranks` for a command that keeps what has finished: the command's exit code, whatever happens."""
    try:
        with sigterm_interrupts():
            run_ranks(function, nproc, *args)
    except KeyboardInterrupt:
        print("\nstopped; finished results are kept", file=sys.stderr)
        return INTERRUPTED
    except RankFailure as error:
        print(f"\na rank failed; finished results are kept.\n{error}", file=sys.stderr)
        return 1
    return 0


def _rank(
    rank: int, function: Callable[..., None], nproc: int, folder: Path, parent: int, args: tuple[Any, ...]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which then ends all ranks at once
    killed_with(parent)()  # torch has asked for SIGINT then, which is ignored by now
    try:
        function(rank, rendezvous_in(folder, rank, nproc), *args)
    except Exception:
        with suppress(FileExistsError), (folder / FIRST_FAILURE).open("x", encoding="utf-8") as file:
            file.write(f"rank {rank}:\n{traceback.format_exc()}")
        raise
