"""Groups that torch does not count."""

import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from gradwire.ddp_core.transport.private_group import known_group
from gradwire.ddp_core.transport.process_group import over

LIMIT, CPU = timedelta(seconds=20), torch.device("cpu")
TIMES = 40


def one_after_the_other(rank, world_size):
    """Sums over groups of which each ends before the next one is made, what torch tells of one, and what is left of it."""
    sums, kept = [], dict(c10d._world.pg_map)
    for _ in range(TIMES):
        with known_group(over(dist.group.WORLD), LIMIT, CPU) as group:
            dist.all_reduce(value := torch.tensor(rank + 1.0), group=group)
            told = dist.get_process_group_ranks(group), dist.get_backend(group), dist.get_rank(group)
            ended = weakref.ref(group)
        del group
        sums.append(value.item())
    assert c10d._world.pg_map == kept
    return sums, told, ended() is None


def test_groups_follow_each_other_and_torch_knows_each_for_its_time(ranks):
    for rank, (sums, told, ended) in enumerate(ranks.run(one_after_the_other, 2)):
        assert sums == [3.0] * TIMES
        assert told == ([0, 1], "gloo", rank)
        assert ended
