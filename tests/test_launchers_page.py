"""Each launch of docs/launchers.md starts two ranks: stand-ins are there for srun, scontrol, mpirun and Kubernetes."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import yaml

from .test_docs import FENCE, PAGES
from .test_examples import FOLDER, printed
from .test_first_minutes import printed_commands, saved

LIMIT = 280  # seconds that a launch may take
pytestmark = pytest.mark.timeout(2 * LIMIT)
STAND_IN = (
    f"#!{sys.executable} -S\n"
    + """
import os, subprocess, sys
words, variables = sys.argv[1:], dict(os.environ)
def option(name, count=1):
    place = words.index(name)
    return [words.pop(place) for _ in range(count + 1)][-1]
def start(count, of_rank):
    ranks = [subprocess.Popen(words, env={**variables, **of_rank(rank, count)}) for rank in range(count)]
    sys.exit(max(rank.wait() for rank in ranks))
"""
)
SRUN = """
count = int(option("--nodes")) if "--nodes" in words else int(variables["SLURM_NNODES"])
if "--ntasks-per-node" in words:
    assert option("--ntasks-per-node") == "1"
start(count, lambda rank, count: {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(count), "SLURM_LOCALID": "0",
                                  "SLURM_STEP_TASKS_PER_NODE": f"1(x{count})", "SLURM_NODEID": str(rank)})
"""
MPIRUN = """
count = int(option("-n"))
assert len(option("--host").split(",")) == count
while "-x" in words:
    name, _, value = option("-x").partition("=")
    variables[name] = value
start(count, lambda rank, count: {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(count),
                                  "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
"""
SCONTROL = """
assert words[:2] == ["show", "hostnames"]
print("127.0.0.1")
"""


@pytest.fixture
def cluster(tmp_path, unused_port, forked_python):
    """Runs a page's text for bash beside its train.py, on a port of its own, and returns what it prints."""
    saved("docs/two-hosts.md", tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    texts = {"srun": STAND_IN + SRUN, "mpirun": STAND_IN + MPIRUN, "scontrol": STAND_IN + SCONTROL}
    words, of_torchrun = forked_python.torchrun()
    for name, program in (("python", words[:1]), ("torchrun", words)):
        texts[name] = f'#!/bin/sh\nexec {" ".join(program)} "$@"\n'
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    outside |= {"PATH": f"{programs}:{os.environ['PATH']}", "GLOO_SOCKET_IFNAME": "lo", **of_torchrun}

    def run(text, **variables):
        text = re.sub(r"\b29[45]00\b", str(unused_port), text)
        done = subprocess.run(
            ["bash", "-euc", text], cwd=tmp_path, env={**outside, **variables}, capture_output=True, text=True, timeout=LIMIT
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stderr + done.stdout

    run.port = str(unused_port)
    return run


def block(language):
    """The page's only block of a language."""
    (found,) = [text for kind, text in FENCE.findall(PAGES["docs/launchers.md"]) if kind == language]
    return found


def trained_on_two(output):
    """Whether rank 0 said that two ranks have trained, compressed: one alone counts all bytes of its gradients."""
    return len(re.findall(r"step 60 .* 3\.\d+x fewer bytes, at [\d.]+ [kM]bit/s", output)) == 1


@pytest.mark.slow
def test_the_sbatch_script_starts_a_torchrun_per_host(cluster):
    names = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", block("bash"), re.MULTILINE))
    assert (names["nodes"], names["ntasks-per-node"]) == ("2", "1")
    found = cluster(block("bash"), SLURM_NNODES="2", SLURM_JOB_ID="7", SLURM_JOB_NODELIST="host[1-2]")
    assert trained_on_two(found), found


@pytest.mark.slow
def test_srun_alone_starts_the_ranks(cluster):
    found = cluster("\n".join(printed_commands("docs/launchers.md", "export MASTER_ADDR|srun --nodes")))
    assert trained_on_two(found), found


@pytest.mark.slow
def test_mpirun_starts_the_ranks(cluster):
    (command,) = printed_commands("docs/launchers.md", "mpirun -n 2 --host")
    found = cluster(command.replace("=HOST", "=127.0.0.1"))
    assert trained_on_two(found), found


def pods():
    """The containers of the page's PyTorchJob: the master's, then the worker's."""
    job = yaml.safe_load(block("yaml"))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert [replicas[kind]["replicas"] for kind in ("Master", "Worker")] == [1, 1]
    return [
        container for kind in ("Master", "Worker") for container in replicas[kind]["template"]["spec"]["containers"]
    ]


def test_the_pods_of_the_pytorchjob_are_alike_and_have_the_name_that_the_operator_looks_for():
    master, worker = pods()
    assert master == worker
    assert master["name"] == "pytorch"
    assert {each["name"]: each["value"] for each in master["env"]}["NCCL_SOCKET_IFNAME"] == "eth0"


@pytest.mark.slow
def test_the_command_of_the_pytorchjob_starts_the_ranks(cluster):
    shell, flag, command = pods()[0]["command"]
    assert (shell, flag) == ("sh", "-c")
    on_each = f"RANK=1 sh -c '{command}' & first=$!; RANK=0 sh -c '{command}'; wait $first"
    found = cluster(on_each, MASTER_ADDR="127.0.0.1", MASTER_PORT=cluster.port)
    assert trained_on_two(found), found


@pytest.mark.thorough
@pytest.mark.skipif(not find_spec("ray"), reason="ray is not installed")
def test_a_training_under_ray_continues_after_a_rank_was_killed(tmp_path):
    source = (FOLDER / "train_ray.py").read_text("utf-8")
    died = tmp_path / "died"
    kill = f"if step == 20 and rank == 1 and not Path({str(died)!r}).exists():\n"
    kill += (
        f"            Path({str(died)!r}).touch()\n            __import__('os').kill(__import__('os').getpid(), 9)\n"
    )
    step = "        optimizer.zero_grad()\n"
    assert step in source
    script = tmp_path / "train_ray.py"
    script.write_text(source.replace(step, f"{step}        {kill}", 1), "utf-8")
    assert "32 steps on 2 ranks" in printed([sys.executable, str(script)], tmp_path)
    assert died.exists()
