import os
import time

import pytest
import torch
import torch.distributed as dist

from .ranks import RankError


def total(rank, world_size):
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor)
    return tensor


def one_raises(rank, world_size):
    if rank == 1:
        raise ValueError("on purpose")


def one_dies(rank, world_size):
    if rank == 1:
        os._exit(7)
    time.sleep(0.5)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_reduce_together(ranks, world_size):
    expected = torch.tensor([float(sum(range(world_size)))])
    assert all(torch.equal(answer, expected) for answer in ranks.run(total, world_size))


def test_a_failing_and_a_dead_rank_are_named_and_replaced(ranks):
    with pytest.raises(RankError, match="on purpose"):
        ranks.run(one_raises, 2)
    with pytest.raises(RankError, match="rank 1 died with exit code 7"):
        ranks.run(one_dies, 2)
    assert len(ranks.run(total, 2)) == 2
