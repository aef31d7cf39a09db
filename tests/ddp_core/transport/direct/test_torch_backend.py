"""torch's own DDP, FSDP2 and DTensor on the backend gradwire: what they give is what they give on Gloo."""

import os
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.ddp_core.transport.direct import torch_backend
from gradwire.ddp_core.transport.direct.collectives import GLOO, PINNED, Collectives, best_ways
from gradwire.ddp_core.transport.direct.wire import Staggered
from gradwire.ddp_core.transport.torch_groups import store_of

LIMIT = timedelta(seconds=30)
PATIENCE = 30.0  # seconds
NEW_ENOUGH = tuple(map(int, torch.__version__.split(".")[:2])) >= torch_backend.LEAST_TORCH
needs_torch = pytest.mark.skipif(not NEW_ENOUGH, reason="torch cannot have backends in Python")
OTHER_ORDER = "reduce_scatter list"  # in which Gloo adds up; not so that of a single tensor
KINDS = torch_backend.SMALLEST_BYTES
LARGE = max(KINDS.values()) // 4  # elements, of which any number of ranks has enough bytes


def begin_anew(backend, way="staggered"):
    """This pool's ranks, in a default group of this backend, whose large collectives go this way."""
    import gradwire.backend

    os.environ[PINNED] = way if way == GLOO else ""
    make_ways = best_ways if way == "rails" else lambda wire: dict.fromkeys(KINDS, Staggered(wire))
    torch_backend.Collectives = partial(Collectives, make_ways=make_ways)

    assert gradwire.backend.register
    store, rank, world_size = store_of(dist.group.WORLD), dist.get_rank(), dist.get_world_size()
    dist.barrier()  # or one closes what another has not opened yet
    dist.destroy_process_group()
    dist.init_process_group(
        backend, store=dist.PrefixStore("anew", store), rank=rank, world_size=world_size, timeout=LIMIT
    )


def numbers(rank, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def works_of_torch(rank, world_size, backend, way):
    """What some of torch's collectives give, by name."""
    begin_anew(backend, way)
    found, block, rows = {}, numbers(rank, LARGE), numbers(rank, world_size, LARGE)
    found["all_gather"] = torch.empty(world_size * LARGE)
    dist.all_gather_into_tensor(found["all_gather"], block)
    found["all_gather list"] = torch.empty(world_size, LARGE)
    dist.all_gather(list(found["all_gather list"].unbind()), block)
    found["all_to_all"] = torch.empty(world_size, LARGE)
    dist.all_to_all_single(found["all_to_all"], rows)
    found["all_to_all uneven"] = torch.empty(LARGE * world_size * (rank + 1))
    sizes = [LARGE * (other + 1) for other in range(world_size)]
    given = numbers(rank, sum(sizes))
    dist.all_to_all_single(found["all_to_all uneven"], given, [sizes[rank]] * world_size, sizes)
    found["reduce_scatter"] = torch.empty(LARGE)
    work = dist.reduce_scatter_tensor(found["reduce_scatter"], rows.view(-1), async_op=True)
    if "gradwire" in backend and way != "gloo":  # whose reduce-scatters have none
        assert torch.equal(work.get_future().wait()[0], found["reduce_scatter"])
    work.wait()
    found["reduce_scatter list"] = torch.empty(LARGE)
    dist.reduce_scatter(found["reduce_scatter list"], list(rows.unbind()))
    found["largest"] = torch.empty(LARGE)
    dist.reduce_scatter_tensor(found["largest"], rows.view(-1), op=dist.ReduceOp.MAX)
    found["all_reduce"] = block.clone()
    dist.all_reduce(found["all_reduce"])
    every_second = dist.new_group(range(0, world_size, 2))
    if rank % 2 == 0:
        found["group"] = torch.empty(dist.get_world_size(every_second), LARGE)
        dist.all_gather_into_tensor(found["group"].view(-1), block, group=every_second)
    objects = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * LARGE})
    found["objects"] = torch.tensor([each["rank"] for each in objects])
    dist.barrier()
    return found


@needs_torch
@pytest.mark.parametrize(("backend", "way"), [("gradwire", "staggered"), ("cpu:gradwire,cuda:gloo", "rails")])
def test_collectives_give_what_they_give_on_gloo(ranks, backend, way):
    ours, theirs = (ranks.run(works_of_torch, 4, each, way) for each in (backend, "gloo"))
    for found, expected in zip(ours, theirs, strict=True):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            if name != "all_reduce" and (way == "rails" or name == OTHER_ORDER):
                torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)
            else:
                assert torch.equal(found[name], tensor), name


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(150, 300), nn.Tanh(), nn.Linear(300, 150))


def sharded(mesh):
    net = model()
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    return net


def replicated(mesh):
    return DistributedDataParallel(model(), process_group=mesh.get_group())


def trained(rank, wrapped):
    """All parameters after some steps of a model that torch has wrapped."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    for step in range(3):
        wrapped(numbers(10 * step + rank, 8, 150)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = [getattr(parameter, "full_tensor", parameter.detach)() for parameter in wrapped.parameters()]
    return torch.cat([parameter.flatten() for parameter in whole])


def trained_on_both(rank, world_size, way):
    begin_anew("gradwire", way)
    ours = DeviceMesh("cpu", range(world_size))
    theirs = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    found = {wrap.__name__: [trained(rank, wrap(mesh)) for mesh in (ours, theirs)] for wrap in (sharded, replicated)}
    whole = numbers(0, LARGE, 2)
    found["DTensor"] = [
        distribute_tensor(whole, mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local()
        for mesh in (ours, theirs)
    ]
    return found


@needs_torch
@pytest.mark.parametrize("way", ["staggered", pytest.param("rails", marks=pytest.mark.slow)])
def test_ddp_fsdp2_and_dtensor_give_what_they_give_on_gloo(ranks, way):
    alone = model().state_dict()
    start = torch.cat([parameter.flatten() for parameter in alone.values()])
    for found in ranks.run(trained_on_both, 4, way):
        for name, (ours, theirs) in found.items():
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6, msg=name)
        assert not torch.equal(found["sharded"][0], start)
        torch.testing.assert_close(found["sharded"][0], found["replicated"][0], rtol=0, atol=1e-5)


def one_rank_dies(rank, world_size, way):
    begin_anew("gradwire", way)
    block, every = torch.ones(LARGE), torch.empty(world_size * LARGE)
    dist.all_gather_into_tensor(every, block)
    if rank == 1:
        os._exit(7)
    dist.reduce_scatter_tensor(block, every)


@needs_torch
@pytest.mark.parametrize("way", ["staggered", "rails"])
def test_where_a_rank_dies_the_others_raise_at_once_and_nothing_is_left(ranks, way):
    before = set(Path("/dev/shm").glob("*"))
    first, dead, last = ranks.run(one_rank_dies, 3, way, expect_errors=True)
    deadline = time.monotonic() + PATIENCE
    while (left := set(Path("/dev/shm").glob("*")) - before) and time.monotonic() < deadline:
        time.sleep(0.05)  # what others make on this machine goes again
    assert not left
    assert dead.fate == "died with exit code 7"
    for survivor in (first, last):
        assert survivor.type_name == "RuntimeError"
        assert survivor.seconds < LIMIT.total_seconds() * 0.9


def test_a_torch_that_is_too_old_is_told_the_way_out(monkeypatch):
    monkeypatch.setattr(torch_backend, "LEAST_TORCH", (99, 1))
    with pytest.raises(
        RuntimeError, match=r"gradwire needs torch 99\.1 or later, and this is .*: upgrade torch, or use"
    ):
        torch_backend.register()


def test_a_debug_level_that_wraps_backends_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr(dist, "get_debug_level", lambda: dist.DebugLevel.DETAIL)
    with pytest.raises(RuntimeError, match="use INFO, or init_process_group"):
        torch_backend.DirectBackend.of(None)
