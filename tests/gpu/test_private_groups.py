"""Private groups and clones of a group of one: they are made, sum and end, ten times, on the CPU and on a GPU."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from gradwire.compress import AllReduce
from gradwire.ddp_core import ProcessGroup
from gradwire.ddp_core.transport.torch_groups import clone_group, time_limit_of

from .test_engine_cuda import nccl, needs_nccl

LIMIT, TIMES = timedelta(seconds=60), 10
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=[pytest.mark.gpu, needs_nccl])]


def parent_of(rank, device):
    return dist.group.WORLD if device == "cpu" else nccl(rank)


def groups_of_a_host(rank, world_size, device):
    """Means over a host of one rank, each on a group of its own that ends behind it; False as long as any is left."""
    transport, found = ProcessGroup(parent_of(rank, device), torch.device(device), LIMIT), []
    for turn in range(TIMES):
        transport.open(1)
        value = torch.full((1000,), turn + 1.0, device=device)
        reply = transport.start(AllReduce(value, scope="host"), 0).wait(LIMIT)
        transport.finish(time.monotonic() + LIMIT.total_seconds())
        found.append((reply.unique().tolist(), bool(transport._groups)))
    return found


def clones(rank, world_size, device):
    """Sums on clones, each ended behind its sum, and the groups that torch knows in the end beside those before."""
    parent, known = parent_of(rank, device), len(c10d._world.pg_map)
    found = []
    for turn in range(TIMES):
        clone = clone_group(parent, time_limit_of(parent, torch.device(device), LIMIT))
        dist.all_reduce(value := torch.full((1000,), turn + 1.0, device=device), group=clone)
        found.append(value.unique().tolist())
        dist.destroy_process_group(clone)
    return found, len(c10d._world.pg_map) - known


@pytest.mark.parametrize("device", DEVICES)
def test_groups_of_one_rank_follow_each_other_on_a_transport(ranks, device):
    assert ranks.run(groups_of_a_host, 1, device) == [[([turn + 1.0], False) for turn in range(TIMES)]]


@pytest.mark.parametrize("device", DEVICES)
def test_clones_of_a_group_of_one_rank_follow_each_other(ranks, device):
    assert ranks.run(clones, 1, device) == [([[turn + 1.0] for turn in range(TIMES)], 0)]
