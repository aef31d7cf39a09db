"""One command on every host of a lab, as a launcher would start it."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import IO

from ....ddp_core.transport.launchers import launcher_of
from ...ranks.launchers import LAB_VARIABLE, lab_here
from ...ranks.own_command import own_command
from ...ranks.stopping import killed_with, sigterm_interrupts
from ...results.files import check_file
from .config import NetlabConfig
from .hosts import WIRE, Lab, NetlabError, temporary_lab
from .utilization import recorded

PORT = 29400
POLL_SECONDS = 0.02
VICTIM_SECONDS = 0.5  # from the first failure until the others are asked to end: one of them may be the cause
SURVIVOR_SECONDS = 5.0  # from the request to end until the kill
KILLED_SECONDS = 1.0  # from the kill until a process is taken to be gone
SHOWN_LINES = 60  # of the output of a rank that fails
SIGNALLED = 128  # shells add it to a signal's number
Process = subprocess.Popen[bytes]


def rerun_on_hosts(config: NetlabConfig) -> int | None:
    """Run this very command line on every host; its exit code.

    None where there is nothing to do: no lab is asked for, or this process is on a host of it already.
    """
    if config.hosts == 0 or lab_here() is not None:
        return None
    return run_on_hosts(config, own_command(*sys.argv[1:]))


def run_on_hosts(config: NetlabConfig, command: Sequence[str]) -> int:
    """Run a command once for every rank of every host, with torchrun's variables and Gloo bound to the limited link.

    Shows the output of rank 0, and of others that fail by themselves. The first rank that fails ends the others; its exit
    code is returned, 128 + n for signal n. However this ends, nothing is left. Raises NetlabError where there can be no lab,
    and ValueError where `utilization` is no file that can be written.
    """
    _check(config, command)
    with sigterm_interrupts(), temporary_lab(config) as lab, ExitStack() as files:
        ranks = range(1, config.hosts * config.ranks_per_host)
        outputs = [files.enter_context(tempfile.TemporaryFile()) for _ in ranks]
        with _started(lab, config, command, outputs) as processes, recorded(config, lab):
            failures = _failures(processes)
        for rank, code in failures.items():
            if rank:
                _show(_named(rank, config), outputs[rank - 1])
            print(f"netlab: {_named(rank, config)} ended with exit code {code}", file=sys.stderr)
        return next(iter(failures.values()), 0)


def _check(config: NetlabConfig, command: Sequence[str]) -> None:
    if config.hosts < 1:
        raise NetlabError(f"hosts is at least 1, got {config.hosts}: --hosts 4")
    if lab_here() is not None:
        raise NetlabError(f"this process is on a host of a lab already ({lab_here()}), and labs do not nest")
    if launcher_of(os.environ) is not None:
        raise NetlabError("a lab starts its ranks by itself: run this without torchrun, once")
    if not command or shutil.which(command[0]) is None:
        raise NetlabError(f"no such command: {command[0] if command else 'give one behind --'}")
    check_file("utilization", config.utilization)


@contextmanager
def _started(
    lab: Lab, config: NetlabConfig, command: Sequence[str], outputs: Sequence[IO[bytes]]
) -> Iterator[list[Process]]:
    """A process for every rank; none is left at the end."""
    processes: list[Process] = []
    try:
        for rank, output in enumerate([None, *outputs]):
            namespace = lab.namespace(rank // config.ranks_per_host)
            processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", namespace, *command],
                    env={**os.environ, **_variables(lab, config, rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C is the parent's alone
                    preexec_fn=killed_with(os.getpid()),
                )
            )
        yield processes
    finally:
        _end(processes)


def _variables(lab: Lab, config: NetlabConfig, rank: int) -> Mapping[str, str]:
    ranks, here = config.hosts * config.ranks_per_host, config.ranks_per_host
    threads = max(1, (os.cpu_count() or 1) // ranks)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank % here),
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": str(lab.address(0)),
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": WIRE,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),  # it warns that addresses have no names
        LAB_VARIABLE: config.described,
    }


def _failures(processes: Sequence[Process]) -> dict[int, int]:
    """Wait for all ranks, and after a failure a moment only; by rank the exit codes that are not 0, as they were seen."""
    running, failures, deadline = dict(enumerate(processes)), dict[int, int](), math.inf
    while running and time.monotonic() < deadline:
        ended = {rank: code for rank, process in running.items() if (code := process.poll()) is not None}
        running = {rank: process for rank, process in running.items() if rank not in ended}
        failures |= {rank: code if code > 0 else SIGNALLED - code for rank, code in ended.items() if code}
        if failures:
            deadline = min(deadline, time.monotonic() + VICTIM_SECONDS)
        time.sleep(POLL_SECONDS)
    return failures


def _end(processes: Sequence[Process]) -> None:
    """Ask what still runs to end, and kill what does not."""
    running = [process for process in processes if process.poll() is None]
    try:
        for process in running:
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + SURVIVOR_SECONDS
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process in running:
            if process.poll() is None:
                _signal(process, signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):  # an interrupt amid a poll makes Popen wait for ever
                    process.wait(KILLED_SECONDS)


def _signal(process: Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended meanwhile
        os.killpg(process.pid, number)


def _named(rank: int, config: NetlabConfig) -> str:
    if config.ranks_per_host == 1:
        return f"host {rank}"
    return f"rank {rank} on host {rank // config.ranks_per_host}"


def _show(name: str, output: IO[bytes]) -> None:
    output.seek(0)
    for line in output.read().decode(errors="replace").splitlines()[-SHOWN_LINES:]:
        print(f"{name}: {line}", file=sys.stderr)
