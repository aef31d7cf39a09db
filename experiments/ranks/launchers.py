"""Ranks that torchrun, mpirun, Slurm or a network lab has started, told by variables; all get those of torchrun."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

TORCHRUN = "torchrun"
LAB_VARIABLE = "GRADWIRE_NETLAB"  # in the environment of every rank in a lab: what the lab is like
ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
HOW_TO_PASS = {
    "Open MPI": "mpirun -x MASTER_ADDR=FIRST_HOST -x MASTER_PORT=29500 ...",
    "Slurm": "export MASTER_ADDR=$(scontrol show hostnames | head -n 1) MASTER_PORT=29500 before srun",
}


@dataclass(frozen=True)
class Launcher:
    """Where a launcher tells a process its place. `local_size` may be a function of all variables."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str | Callable[[Mapping[str, str]], str | None]


def slurm_tasks_here(environment: Mapping[str, str]) -> str | None:
    """The tasks of this node, from `SLURM_STEP_TASKS_PER_NODE` such as 4(x2),3; None where it is not told.

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
    # SLURM_NTASKS stands in a batch script, too, which is no rank: only srun sets the number of a step's tasks
    Launcher("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", slurm_tasks_here),
    Launcher("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def adopt_launcher(environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Which launcher has started this process as one of several ranks, its variables set as torchrun sets them.

    None where there is no launcher, or one that has started a single process. Raises ValueError where a launcher does not
    tell all that is needed, with the way to tell it.
    """
    for launcher in LAUNCHERS:
        if not {launcher.rank, launcher.size} <= environment.keys():
            continue
        if launcher.name != TORCHRUN and environment[launcher.size] == "1":
            continue
        _adopt(launcher, environment)
        return launcher.name
    return None


def _adopt(launcher: Launcher, environment: MutableMapping[str, str]) -> None:
    if missing := [name for name in ADDRESS if not environment.get(name)]:
        way = HOW_TO_PASS.get(launcher.name, "export MASTER_ADDR=FIRST_HOST MASTER_PORT=29500 on every host")
        raise ValueError(
            f"{' and '.join(missing)} must say where rank 0 is, and {launcher.name} does not set "
            f"{'it' if len(missing) == 1 else 'them'}: {way}"
        )
    local_size = launcher.local_size
    told = environment.get(local_size) if isinstance(local_size, str) else local_size(environment)
    local = {"LOCAL_RANK": environment.get(launcher.local_rank), "LOCAL_WORLD_SIZE": told}
    for name, value in local.items():
        if value is None and name not in environment:
            raise ValueError(
                f"{launcher.name} does not tell {name}: export it, so that ranks on one machine know each other"
            )
        environment[name] = value if value is not None else environment[name]
    environment.update(RANK=environment[launcher.rank], WORLD_SIZE=environment[launcher.size])


def under_launcher() -> bool:
    """Whether torchrun, or another launcher that sets its variables, has started this process as a rank."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def lab_here() -> str | None:
    """The lab that this process runs in, such as `4 hosts at 100 Mbit/s`; None where it runs in none."""
    return os.environ.get(LAB_VARIABLE) or None


def threads_here(asked: int, nproc: int) -> int:
    """Torch's threads for a rank: `asked`, or for 0 an equal share of the cores among the ranks on this machine.

    These are all ranks in a lab, those that a launcher tells of, or else `nproc`.
    """
    variable = "WORLD_SIZE" if lab_here() else "LOCAL_WORLD_SIZE"
    sharing = int(os.environ.get(variable, nproc))
    return asked or max(1, (os.cpu_count() or 1) // sharing)
