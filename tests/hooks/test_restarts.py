"""Ranks that torchrun starts anew make their groups anew, whatever the life before has left in the store."""

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradwire.ddp_core import ProcessGroup, over
from gradwire.ddp_core.transport import private_group

LIMIT = timedelta(seconds=20)


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
