"""A transport of a user's own: all that ranks send each other goes over it, and nothing over the process group."""

import itertools
import pickle
from collections import defaultdict
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

import gradwire
from gradwire.compress.simulate import answered
from gradwire.ddp_core.transport.protocol import Reply, Transport
from gradwire.ddp_core.transport.torch_groups import known_to_torch, store_of

from ...ranks import GROUP_TIMEOUT

STEPS = 3
RUNS = itertools.count()


class Answer(Reply):
    def __init__(self, transport, key, request):
        self._transport, self._key, self._request = transport, key, request

    def wait(self, timeout):
        transport, key = self._transport, self._key
        members = transport.ranks.members(self._request.scope)
        stores = transport.stores[key.partition("/")[0]]
        tensors = [pickle.loads(stores.get(f"{key}/{member}")) for member in members]
        return answered(self._request, tensors)[members.index(transport.ranks.rank)]


class OverStore(Transport):
    """Every rank writes its tensors into a store, and reads those of the others; each channel has its own connection."""

    def __init__(self, inner):
        self.group, self.ranks = inner.group, inner.ranks
        self._store, self._begun = store_of(inner.group), defaultdict(int)
        self.stores, self.asked = {}, []

    def start(self, request, channel):
        if str(channel) not in self.stores:
            self.stores[str(channel)] = self._store.clone()
        number, self._begun[channel] = self._begun[channel], self._begun[channel] + 1
        self.asked.append((channel, type(request).__name__))
        key = f"{channel}/{number}"
        self.stores[str(channel)].set(f"{key}/{self.ranks.rank}", pickle.dumps(request.tensor))
        return Answer(self, key, request)


class Model(nn.Module):
    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)  # only what rank 0 has counts
        self.first, self.norm, self.unused = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(2, 2)
        self.last = nn.Linear(16, 4)

    def forward(self, inputs):
        return self.last(self.norm(self.first(inputs)))


def trained(rank, spec, **settings):
    """The model after some steps, a save and a load, and the mean gradients of the last step."""
    ddp = gradwire.DistributedDataParallel(
        Model(rank), compressor=spec, bucket_cap_mb=0.0005, find_unused_parameters=True, **settings
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(STEPS):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        ddp(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()
        if step == 1:
            ddp.compression.scatter_state_dict(ddp.compression.gather_state_dict())
    return {name: value.detach().clone() for name, value in ddp.module.named_parameters()}


def both_ways(rank, world_size, spec):
    """A training over Gloo, and one over a store with a group that has no backend; and what the second one sent."""
    made = []

    def over_store(inner):
        made.append(OverStore(inner))
        return made[-1]

    store = dist.PrefixStore(f"new transport {next(RUNS)}", store_of(dist.group.WORLD))
    silent = dist.ProcessGroup(store, rank, world_size)
    silent._set_group_name(f"silent {rank}")
    with known_to_torch(silent, dist.group.WORLD):
        c10d._world.pg_map[silent] = ("none", store)
        with pytest.raises(RuntimeError, match=r"[Bb]ackend"):
            silent.allreduce([torch.zeros(1)])
        settings = {"process_group": silent, "transport": over_store, "timeout": timedelta(seconds=20)}
        found = trained(rank, spec, **settings)
    return trained(rank, spec), found, [asked for each in made for asked in each.asked]


@pytest.mark.parametrize("spec", ["none", "powersgd:rank=2,start_iter=0"])
def test_a_new_transport_carries_all_that_a_training_sends(ranks, spec):
    (over_gloo, found, asked), (_, others, _) = ranks.run(both_ways, 2, spec, timeout=GROUP_TIMEOUT.seconds)
    torch.testing.assert_close(found, over_gloo, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, others, rtol=0, atol=0)
    messages = {kind for channel, kind in asked if channel < 0}
    assert messages == {"AllReduce", "AllGather", "Broadcast", "Gather", "Scatter"}
    assert any(channel >= 0 for channel, _ in asked)
