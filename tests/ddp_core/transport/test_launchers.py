import os
import re

import pytest

from gradwire.compress import Ranks
from gradwire.ddp_core.transport.launchers import adopt_launcher, on_launched_hosts, slurm_tasks_here

from ...forked import Script

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


@pytest.mark.parametrize(
    ("world_size", "variables", "per_host"),
    [(8, TORCHRUN, 4), (8, {}, 1), (4, TORCHRUN, 1), (8, {**TORCHRUN, "LOCAL_WORLD_SIZE": "3"}, 1)],
    ids=["all ranks", "no launcher", "a part of the ranks", "uneven hosts"],
)
def test_ranks_share_a_host_as_the_launcher_says_if_the_group_has_all_of_them(world_size, variables, per_host):
    assert on_launched_hosts(Ranks(world_size, 1), variables) == Ranks(world_size, 1, per_host)


def test_a_process_alone_has_no_launcher():
    assert adopt_launcher({}) is None
    assert adopt_launcher({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}) is None
    assert adopt_launcher({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None  # a batch script, not a rank


def test_a_launcher_without_a_local_rank_is_refused():
    with pytest.raises(ValueError, match="does not set LOCAL_RANK"):
        adopt_launcher({"PMI_RANK": "0", "PMI_SIZE": "2", **ADDRESS})


@pytest.mark.parametrize(("node", "tasks"), [(0, "4"), (1, "4"), (2, "3"), (3, None)])
def test_slurms_tasks_of_a_node_are_read_from_its_short_form(node, tasks):
    assert slurm_tasks_here({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": str(node)}) == tasks


@pytest.mark.parametrize(
    "variables",
    [
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"},
        {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"},
        {**MPICH, "MPI_LOCALNRANKS": "8"},
    ],
    ids=["Open MPI", "Slurm", "MPICH"],
)
def test_ranks_of_one_host_need_no_address(variables):
    environment = dict(variables)
    adopt_launcher(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("127.0.0.1", "29500")


SCRIPT = """
import sys, torch, gradwire, torch.distributed as dist
device = gradwire.init_process_group()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).to(device))
handle = gradwire.attach(model, "bf16")
model(torch.full((1, 4), float(dist.get_rank()))).sum().backward()
with open(sys.argv[1] + str(dist.get_rank()), "w") as file:
    file.write(f"{dist.get_world_size()} {model.module.weight.grad[0, 0].item()}")
handle.close()
dist.destroy_process_group()
"""
APART = """
import torch, gradwire, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
handle = gradwire.attach(model, "bf16")
for _ in range(2):
    model.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
handle.close()
dist.destroy_process_group()
"""


def launched(script, variables, *arguments):
    """Start a script in a process of its own with a launcher's variables and no other's."""
    names = {*TORCHRUN, *ADDRESS, *OPEN_MPI, *SLURM, *MPICH}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    return Script(script, *arguments, variables={**environment, **variables, "GLOO_SOCKET_IFNAME": "lo"})


@pytest.mark.parametrize("kind", ["Open MPI", "Slurm", "torchrun"])
def test_a_script_joins_the_ranks_that_a_launcher_started(kind, tmp_path, unused_port):
    given = {
        "Open MPI": lambda rank: (
            {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank}
            | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
        ),
        "Slurm": lambda rank: (
            {**SLURM, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0"}
            | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
        ),
        "torchrun": lambda rank: (
            {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
            | {"MASTER_ADDR": "127.0.0.1"}
        ),
    }[kind]
    started = [
        launched(SCRIPT, {**given(str(rank)), "MASTER_PORT": str(unused_port)}, f"{tmp_path}/") for rank in range(2)
    ]
    ended = [script.end() for script in started]
    assert [each.code for each in ended] == [0, 0], ended
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2 0.5", "2 0.5"]


def test_a_script_that_no_launcher_started_is_a_group_of_one_with_a_warning(tmp_path):
    ended = launched(SCRIPT, {}, f"{tmp_path}/").end()
    assert ended.code == 0
    assert re.fullmatch(r"gradwire: one rank trains alone .* torchrun --nproc-per-node GPUS\n", ended.errors)
    assert (tmp_path / "0").read_text() == "1 0.0"


def test_ranks_that_train_apart_are_warned_of_once():
    ended = launched(APART, SLURM).end()
    assert ended.code == 0, ended.errors
    assert ended.errors.count("Slurm started 8 ranks, but the process group has 1") == 1
    assert "gradwire.init_process_group()" in ended.errors


def test_one_rank_that_a_launcher_started_alone_is_not_warned_of():
    alone = {**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    ended = launched(APART, alone).end()
    assert (ended.errors, ended.code) == ("", 0)
