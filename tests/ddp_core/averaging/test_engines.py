"""One engine a device and group: buckets go in turn among groups, each over what was put around its transport."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradwire.compress import Ranks, compressor
from gradwire.ddp_core.averaging.engines import Engines
from gradwire.ddp_core.transport.protocol import Decorated

CPU, LIMIT = torch.device("cpu"), timedelta(seconds=20)


def test_buckets_go_in_turn_among_the_groups(group):
    other = dist.new_group([0])
    engines = Engines([group, other], LIMIT, None)
    found = [engines.of(CPU, index) for index in range(4)]
    assert [found.index(engine) for engine in found] == [0, 1, 0, 1]
    assert [engine.transport.group for engine in found[:2]] == [group, other]
    assert engines.idle
    engines.close()
    with pytest.raises(RuntimeError, match="was closed"):
        found[0].prepare(1)


def test_what_was_given_is_put_around_each_transport_and_no_bucket_lies_in_memory_that_it_does_not_see(group):
    made = []
    engines = Engines([group], LIMIT, lambda transport: made.append(Decorated(transport)) or made[-1])
    assert engines.of(CPU, 0).transport is made[0]
    assert len(made) == 1
    allocate = engines.allocator(compressor("none"), CPU, sums=True)
    assert allocate([[torch.zeros(3)]]) == [None]
    engines.close()


def test_without_a_group_it_is_the_default_one_once_there_is_one():
    engines = Engines([], LIMIT, None)
    with pytest.raises(RuntimeError, match="there is no process group yet"):
        _ = engines.ranks
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert engines.ranks == Ranks(1)
    finally:
        dist.destroy_process_group()


def test_hosts_have_the_ranks_that_a_compressor_was_told(group):
    engines = Engines([group], LIMIT, None)
    assert engines.placed_ranks(compressor("onebit"), CPU).per_host == 1
    assert engines.placed_ranks(compressor("hosts:ranks=1+onebit"), CPU).per_host == 1
    with pytest.raises(ValueError, match="hosts:ranks=4 does not divide the 1 ranks"):
        engines.placed_ranks(compressor("hosts:ranks=4+onebit"), CPU)
    assert engines.placed_ranks(compressor("hosts+onebit"), CPU).per_host == 1  # found by a look
