"""FSDP2 and `replicate` on CUDA: parameters end where the same training on the CPU brings them."""

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gradwire
from gradwire.hooks.fsdp.modules import SINCE

from ..hooks.fsdp.given import network, trained, whole
from ..hooks.replicate.given import local
from ..torch_versions import replicate_of_fsdp
from .test_engine_cuda import nccl, needs_nccl

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
needs_shards = pytest.mark.skipif(
    torch.__version__ < SINCE, reason=f"FSDP2 takes communication of others since {SINCE}"
)
NAMES = ("replicate", "shard")
RATE = 0.01  # of learning: a rounding is not amplified
CLOSE = 0.01  # of the way from the first parameters to the last; a code of 4 bits that is rounded otherwise is 0.004
BACKENDS = pytest.mark.parametrize(
    ("backend", "world_size"), [("gloo", 2), pytest.param("nccl", 1, marks=needs_nccl)], ids=["gloo", "nccl"]
)
OF_SHARDS = [{}, {"gather": "int8"}]
OF_SHARDS += [{"reduce": spec} for spec in ("int8", "int4", "onebit", "onebit:rotate=false", "int4:residual_bits=8")]
OF_SHARDS += [{"gather": "int8", "reduce": "int4"}]
OF_REPLICAS = [{"replicas": spec} for spec in ("none", "int8", "onebit", "powersgd:rank=2", "topk:ratio=0.1")]


def mesh_of(rank, world_size, device, backend, replicated):
    """One row of shards, or of two replicas; of one where this rank is alone."""
    if device == "cuda":
        torch.cuda.set_device(0)
    if backend == "gloo":
        replicas = min(2, world_size)
        shape = (replicas, world_size // replicas) if replicated else (world_size,)
        return init_device_mesh(device, shape, mesh_dim_names=NAMES[-len(shape) :])
    if not replicated:
        return DeviceMesh.from_group(nccl(rank), device, mesh_dim_names=NAMES[1:])
    groups = [nccl(rank), nccl(rank)]
    return DeviceMesh.from_group(groups, device, mesh=torch.tensor([[rank]]), mesh_dim_names=NAMES)


def sharded(rank, world_size, device, backend, arguments):
    """The whole parameters before and after a training, on the CPU."""
    model = network(world_size, mesh_of(rank, world_size, device, backend, "replicas" in arguments))
    first, handle = whole(model), gradwire.attach(model, **arguments)
    last = trained(model, rank, optimizer=torch.optim.SGD(model.parameters(), lr=RATE))
    handle.close()
    assert {parameter.device.type for parameter in model.parameters()} == {device}
    return flat(first.values()), flat(last.values())


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1).cpu() for tensor in tensors])


def assert_as_on_the_cpu(ranks, function, world_size, backend, given):
    found = ranks.run(function, world_size, "cuda", backend, given, timeout=200)
    expected = ranks.run(function, world_size, "cpu", "gloo", given, timeout=60)
    for (_, on_gpu), (first, on_cpu) in zip(found, expected, strict=True):
        assert torch.equal(on_gpu, found[0][1])
        assert (on_gpu - on_cpu).norm() <= CLOSE * (on_cpu - first).norm()


@needs_nccl
@needs_shards
@pytest.mark.parametrize("arguments", OF_SHARDS, ids=str)
def test_shards_train_as_on_the_cpu(ranks, arguments):
    """Of one rank: with Gloo, torch 2.11 ends a process that shards on CUDA (SIGSEGV), where torch communicates, too."""
    assert_as_on_the_cpu(ranks, sharded, 1, "nccl", arguments)


@needs_shards
@BACKENDS
@pytest.mark.parametrize("arguments", OF_REPLICAS, ids=str)
def test_replicas_of_shards_train_as_on_the_cpu(ranks, backend, world_size, arguments):
    assert_as_on_the_cpu(ranks, sharded, world_size, backend, arguments)


def steps(model, rank, device):
    """Train a model in four steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(4):
        inputs = torch.randn(8, 7, generator=torch.Generator().manual_seed(100 * rank + step))
        model(inputs.to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def replicated(rank, world_size, device, backend, spec):
    """The parameters before and after a training by torch's composable DDP, on the CPU."""
    group = None
    if device == "cuda":
        torch.cuda.set_device(0)
        group = nccl(rank) if backend == "nccl" else None
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 33), nn.ReLU(), nn.Linear(33, 5)).to(device)
    replicate(model, process_group=group)
    model.register_comm_hook(group, gradwire.comm_hook(spec))
    first = flat(model.parameters())
    steps(model, rank, device)
    gradwire.handle_of(model).close()
    return first, flat(model.parameters())


@BACKENDS
@pytest.mark.parametrize("spec", ["none", "int8", "onebit", "powersgd:rank=2"])
def test_replicate_trains_as_on_the_cpu(ranks, backend, world_size, spec):
    assert_as_on_the_cpu(ranks, replicated, world_size, backend, spec)


def replicated_by_fsdp(rank, world_size, device, backend, spec):
    """The parameters before and after a training by torch's newer `replicate`, on the CPU."""
    from torch.distributed._composable.replicate_with_fsdp import replicate as by_fsdp

    if device == "cuda":
        torch.cuda.set_device(0)
    nccls = backend == "nccl" and device == "cuda"
    mesh = DeviceMesh.from_group(nccl(rank), device) if nccls else init_device_mesh(device, (world_size,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 33), nn.ReLU(), nn.Linear(33, 5)).to(device)
    for module in (model[0], model):
        by_fsdp(module, mesh=mesh)
    handle = gradwire.attach(model, spec)
    first = flat(map(local, model.parameters()))
    steps(model, rank, device)
    last = flat(map(local, model.parameters()))
    handle.close()
    return first, last


@replicate_of_fsdp
@BACKENDS
@pytest.mark.parametrize("spec", ["none", "int8", "onebit", "powersgd:rank=2"])
def test_the_newer_replicate_trains_as_on_the_cpu(ranks, backend, world_size, spec):
    assert_as_on_the_cpu(ranks, replicated_by_fsdp, world_size, backend, spec)
