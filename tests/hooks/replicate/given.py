"""Models of torch's `replicate` and the same ones of its DDP, on ranks; what they end with."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

RATE = 0.1


def replicate(module, **options):
    """torch's, of those that have it."""
    from torch.distributed._composable.replicate_with_fsdp import replicate as torchs

    return torchs(module, **options)


def bare():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(33, 20), nn.ReLU())
    return nn.Sequential(nn.Linear(7, 33), nn.ReLU(), inner, nn.Linear(20, 5))


def network(model=None, parts=("0", "2", ""), **options):
    """A model with some modules replicated, each for itself; the root is one of them."""
    model = bare() if model is None else model
    options.setdefault(
        "mesh", init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("ranks",))
    )
    for part in parts:
        replicate(model.get_submodule(part), **options)
    return model


def ddp_network(model=None, **options):
    """The same by torch's DDP, with buckets of about the same parameters."""
    return DistributedDataParallel(bare() if model is None else model, **{"bucket_cap_mb": 0.001, **options})


def inputs(rank, step, rows=8):
    return torch.randn(rows, 7, generator=torch.Generator().manual_seed(100 * rank + step))


def step_of(model, optimizer, batch):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(model, rank, steps=4, first=0, optimizer=None):
    """{name: parameter} after some steps."""
    optimizer = optimizer or torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=RATE)
    for step in range(first, first + steps):
        step_of(model, optimizer, inputs(rank, step))
    return values(model)


def local(tensor):
    """What this rank has of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def values(model):
    """{name: this rank's numbers of a parameter}."""
    named = model.named_parameters()
    return {name.removeprefix("module."): local(each.detach()).clone() for name, each in named}


def gradients(model):
    """{name: this rank's numbers of a gradient}, of those that are there."""
    named = model.named_parameters()
    return {name.removeprefix("module."): local(each.grad).clone() for name, each in named if each.grad is not None}
