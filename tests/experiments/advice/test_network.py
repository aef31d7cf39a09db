"""Collectives that are timed are like those of training."""

import math
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradwire.compress.protocol.requests import AllGather, AllReduce, ReduceScatter
from gradwire.ddp_core import obstacle
from gradwire.ddp_core.transport.host_memory import HostMemory
from gradwire.ddp_core.transport.process_group import ProcessGroup
from gradwire.experiments.advice import network as network_module
from gradwire.experiments.advice.network import Network, _sizes

from ...torch_versions import complex_numbers

LIMIT, LARGEST = timedelta(seconds=20), 2**20
CPU = torch.device("cpu")
IN_HOST = [(ReduceScatter, torch.float32, "host"), (AllGather, torch.float32, "host")]


def rooms_made(rank, world_size):
    """How often memory was allocated for the collectives of each kind, and what they cost."""
    transport, made, found = HostMemory(ProcessGroup(dist.group.WORLD, CPU, LIMIT), lambda: None), [], []
    allocate = transport.allocate
    transport.allocate = lambda buckets: made.append(1) or allocate(buckets)
    network = Network(transport, CPU, LIMIT, per_host=world_size)
    long, network_module.LONG = network_module.LONG, math.inf  # a busy machine tries all sizes, too
    network.costs({(AllReduce, torch.complex64, "all"): LARGEST})  # of a type that is not added up in shared memory
    for kind in IN_HOST:
        before = len(made)
        (cost,) = network.costs({kind: LARGEST}).values()
        found.append((len(made) - before, cost.link.seconds(LARGEST)))
    allocates, network_module.LONG = transport.allocates, long
    transport.abort()
    return found, allocates


@pytest.mark.skipif(bool(obstacle()), reason=obstacle())
@complex_numbers
def test_those_in_a_host_find_their_memory_mapped_as_in_training(ranks):
    for found, allocates in ranks.run(rooms_made, 2):
        assert allocates
        for made, seconds in found:
            assert made == len(_sizes(LARGEST))
            assert seconds > 0
