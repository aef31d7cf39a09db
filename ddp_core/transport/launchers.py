"""Launchers: ranks that torchrun, mpirun or srun started, and the process group that they join."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from ...compress.protocol.layout import Ranks

logger = logging.getLogger(__name__)
TORCHRUN = "torchrun"
ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # of ranks that all run on one host
HOW_TO_PASS = {
    "Open MPI": "mpirun -x MASTER_ADDR=FIRST_HOST -x MASTER_PORT=29500 ...",
    "Slurm": "export MASTER_ADDR=$(scontrol show hostnames | head -n 1) MASTER_PORT=29500 before srun",
}
_warned = False  # that this process trains with fewer ranks than its launcher started


@dataclass(frozen=True)
class Launcher:
    """The variables in which a launcher writes a process's rank. `local_size` may be a function of all variables."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str | Callable[[Mapping[str, str]], str | None]


def slurm_tasks_here(environment: Mapping[str, str]) -> str | None:
    """Return the number of tasks on this node, from `SLURM_STEP_TASKS_PER_NODE` such as 4(x2),3; None if it is unknown.

    >>> slurm_tasks_here({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"})
    '3'
    """
    counts: list[str] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [tasks] * int(times or 1)
    node = int(environment.get("SLURM_NODEID", 0))
    return counts[node] if node < len(counts) else None


LAUNCHERS = (
    Launcher(TORCHRUN, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # a batch script has SLURM_NTASKS too and is no rank: only srun sets the number of tasks of a step
    Launcher("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", slurm_tasks_here),
    Launcher("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def launcher_of(environment: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that started this process as one of several ranks; torchrun may have started a single one."""
    for launcher in LAUNCHERS:
        both = {launcher.rank, launcher.size} <= environment.keys()
        if both and (launcher.name == TORCHRUN or environment[launcher.size] != "1"):
            return launcher
    return None


def adopt_launcher(environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Set torchrun's variables from those of the launcher, and return its name; None if there is no launcher.

    Ranks that all run on one host need no address. Raises ValueError if a variable that is needed is missing, and says
    how to set it.
    """
    launcher = launcher_of(environment)
    if launcher is None:
        return None
    local_size = launcher.local_size
    tasks_here = environment.get(local_size) if isinstance(local_size, str) else local_size(environment)
    local = {"LOCAL_RANK": environment.get(launcher.local_rank), "LOCAL_WORLD_SIZE": tasks_here}
    for name, value in local.items():
        if value is None and name not in environment:
            raise ValueError(
                f"{launcher.name} does not set {name}: export it, so that ranks of one host find each other"
            )
        environment[name] = value if value is not None else environment[name]
    if environment["LOCAL_WORLD_SIZE"] == environment[launcher.size]:
        for name, value in ADDRESS.items():
            environment.setdefault(name, value)
    if missing := [name for name in ADDRESS if not environment.get(name)]:
        way = HOW_TO_PASS.get(launcher.name, "export MASTER_ADDR=FIRST_HOST MASTER_PORT=29500 on every host")
        raise ValueError(
            f"{' and '.join(missing)} must say where rank 0 is, and {launcher.name} does not set "
            f"{'it' if len(missing) == 1 else 'them'}: {way}"
        )
    environment.update(RANK=environment[launcher.rank], WORLD_SIZE=environment[launcher.size])
    return launcher.name


def init_process_group(backend: str | None = None, *, timeout: timedelta | None = None) -> torch.device:
    """Join the ranks that torchrun, srun or mpirun started. A process that no launcher started becomes a group of one rank,
    with a warning.

    Args:
        backend: as for `torch.distributed.init_process_group`. The default is NCCL if torch finds a GPU for each rank
            of this host, and Gloo otherwise.
        timeout: limit of collectives; the default is torch's.

    Returns:
        The device of this rank. With NCCL it is the GPU of the rank's number on its host, and the current device.
        With Gloo it is the CPU.

    Raises:
        ValueError: the launcher does not say where rank 0 is, or NCCL is asked for and a rank has no GPU.
    """
    launcher = adopt_launcher()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if launcher else 1
    gpus = torch.cuda.device_count()
    if backend is None:
        backend = "nccl" if dist.is_nccl_available() and gpus >= here else "gloo"
    if backend == "nccl" and gpus < here:
        raise ValueError(
            f"nccl needs a GPU for each rank: this host has {here} ranks and {gpus} GPUs; pass backend='gloo'"
        )
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) if launcher else 0)
        torch.cuda.set_device(device)
    if launcher:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
        logger.warning(
            "gradwire: one rank trains alone and sends nothing. Start several by torchrun --nproc-per-node GPUS"
        )
    return device


def on_launched_hosts(ranks: Ranks, environment: Mapping[str, str] = os.environ) -> Ranks:
    """Return the ranks of a group on their hosts by torchrun's variables; as they are if the group has other ranks.

    >>> on_launched_hosts(Ranks(4), {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
    Ranks(world_size=4, rank=0, per_host=2)
    """
    started, here = (environment.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if started != str(ranks.world_size) or not here.isdecimal() or int(here) < 1 or ranks.world_size % int(here):
        return ranks
    return replace(ranks, per_host=int(here))


def warn_if_apart() -> None:
    """Warn once if the launcher started more ranks than the default process group has: the others train apart."""
    global _warned
    launcher = launcher_of(os.environ)
    if _warned or launcher is None or not dist.is_initialized():
        return
    started, ranks = int(os.environ[launcher.size]), dist.get_world_size()
    if started > ranks:
        _warned = True
        logger.warning(
            "%s started %d ranks, but the process group has %d: gradients are not averaged with the other ranks. Call "
            "gradwire.init_process_group(), which reads the variables of torchrun, srun and mpirun",
            launcher.name,
            started,
            ranks,
        )
