"""torchrun starts ranks anew when one is killed: training goes on, whatever the life before has left in the store."""

import os
import re
import subprocess
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradwire.ddp_core import ProcessGroup, over
from gradwire.ddp_core.transport import private_group

LIMIT = timedelta(seconds=20)
SCRIPT = """
import os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist
import gradwire
way, lives, limit = sys.argv[1], int(sys.argv[2]), timedelta(seconds=20)
dist.init_process_group("gloo", timeout=limit)
rank, life, network = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"]), torch.nn.Linear(64, 8)
if way == "own":
    model = gradwire.DistributedDataParallel(network, compressor="powersgd:rank=1", timeout=limit)
    handle = model.compression
else:
    model = torch.nn.parallel.DistributedDataParallel(network)
    handle = gradwire.attach(model, "powersgd:rank=1", timeout=limit)
for step in range(3):
    model(torch.ones(2, 64)).sum().backward()
    if step == 1 and life < lives and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
sys.stdout.write(f"rank {rank} trained in life {life}\\n")  # at once: both ranks write
sys.stdout.flush()
handle.close()
dist.destroy_process_group()
"""


def lives_through(folder, way, restarts, python):
    """What the ranks print in their last life."""
    script = folder / "train.py"
    script.write_text(SCRIPT, "utf-8")
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts), "--monitor-interval", "0.1"]
    mine = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command, others = python.torchrun(*options, str(script), way, str(restarts))
    variables = {**os.environ, **mine, **others}
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=90 * (restarts + 1), check=False
    )
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank")), done.stderr[-2000:]


def survives(folder, way, restarts, python):
    lines, errors = lives_through(folder, way, restarts, python)
    assert lines == [f"rank {rank} trained in life {restarts}" for rank in range(2)], errors


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("way", "restarts"), [("attach", 3), pytest.param("own", 10, marks=pytest.mark.thorough)])
def test_training_goes_on_after_restarts(tmp_path, way, restarts, forked_python):
    survives(tmp_path, way, restarts, forked_python)


def in_two_lives(rank, world_size):
    """The sums over groups of one name and store, of which the first has left its addresses there; and their keys."""
    sums = []
    for _ in range(2):
        private_group._made.clear()  # as in a new process
        name = private_group.new_name(over(dist.group.WORLD))
        group = private_group.private_group(dist.group.WORLD, LIMIT, name)
        numbers = torch.ones(3)
        group.allreduce([numbers]).wait(LIMIT)
        sums.append(numbers.tolist())
        del group
    return sums


def test_a_group_does_not_read_the_addresses_of_an_earlier_life(ranks):
    assert ranks.run(in_two_lives, 2) == [[[2.0] * 3] * 2] * 2


def alone(rank, world_size):
    """What making a group raises where the other rank does not come."""
    message = ""
    if rank == 0:
        with pytest.raises(RuntimeError) as caught:
            ProcessGroup(dist.group.WORLD, torch.device("cpu"), timedelta(seconds=1)).open(1)
        message = str(caught.value)
    else:
        private_group.new_name(over(dist.group.WORLD))
    dist.barrier()
    return message


def test_a_group_that_is_not_made_tells_how_long_it_took(ranks):
    message, _ = ranks.run(alone, 2)
    (seconds,) = re.findall(r"did not all make a process group for round 1: it ended after ([\d.]+) s", message)
    assert 1 <= float(seconds) < 15
