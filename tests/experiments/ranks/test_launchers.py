import os

import pytest

from gradwire.experiments.ranks.launchers import LAB_VARIABLE, adopt_launcher, slurm_tasks_here, threads_here

ADDRESS = {"MASTER_ADDR": "host0", "MASTER_PORT": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("variables", "name"),
    [(OPEN_MPI, "Open MPI"), (SLURM, "Slurm"), (MPICH, "MPICH or Intel MPI"), (TORCHRUN, "torchrun")],
)
def test_a_launchers_variables_become_torchruns(variables, name):
    environment = {**variables, **ADDRESS}
    assert adopt_launcher(environment) == name
    assert environment.items() >= {**TORCHRUN, **ADDRESS}.items()
    with pytest.raises(ValueError, match=r"MASTER_ADDR and MASTER_PORT must say where rank 0 is"):
        adopt_launcher(dict(variables))


def test_a_process_alone_has_no_launcher():
    assert adopt_launcher({}) is None
    assert adopt_launcher({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}) is None
    assert adopt_launcher({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None  # a batch script, not a rank


def test_a_launcher_that_tells_no_local_rank_is_refused():
    with pytest.raises(ValueError, match="does not tell LOCAL_RANK"):
        adopt_launcher({"PMI_RANK": "0", "PMI_SIZE": "2", **ADDRESS})


@pytest.mark.parametrize(("node", "tasks"), [(0, "4"), (1, "4"), (2, "3"), (3, None)])
def test_slurms_tasks_of_a_node_are_read_from_its_short_form(node, tasks):
    assert slurm_tasks_here({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": str(node)}) == tasks


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({}, 4),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}, 2),
        ({"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "8", LAB_VARIABLE: "8 hosts at 1gbit"}, 1),  # which share one machine
        ({"LOCAL_WORLD_SIZE": "64", "WORLD_SIZE": "64"}, 1),
    ],
    ids=["our own ranks", "four a machine", "one a machine", "a lab", "more than cores"],
)
def test_ranks_on_one_machine_share_its_cores_unless_they_are_told_otherwise(variables, threads, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", LAB_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert threads_here(0, nproc=2) == threads
    assert threads_here(3, nproc=2) == 3
