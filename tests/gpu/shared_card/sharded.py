"""FSDP2 and replicate, each beside the same training over Gloo on the CPU."""

import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import gradwire

from .checks import check
from .trainings import compare, flat, network, train

STEPS, CPU = 6, torch.device("cpu")
SHARDED = [{}, {"gather": "int8"}, {"reduce": "int8"}, {"reduce": "int4"}, {"gather": "int8", "reduce": "int4"}]
SHARDED += [{"reduce": "onebit"}, {"reduce": "int4:residual_bits=8"}]
ON_HOSTS = [{"reduce": "hosts:ranks=2+int4"}, {"gather": "hosts:ranks=2+int8", "reduce": "hosts:ranks=2+int8"}]
HYBRID = [{"replicas": spec} for spec in ("none", "int8", "int4", "powersgd:rank=2", "topk:ratio=0.1")]
HYBRID += [{"gather": "int8", "reduce": "int8", "replicas": "int4"}]
MEMORY = [None, {"gather": "none", "reduce": "none"}, {"gather": "int8"}, {"gather": "int8", "reduce": "int8"}]
LARGE = {"depth": 24, "width": 1024}  # its weights are 96 MiB, of which a rank needs those of a few parts at once


def all_ranks(world, device):
    """Return a mesh of one dimension."""
    group = dist.group.WORLD if device == world.device else world.gloo
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=("shard",))


def halves(world, device):
    """Return a mesh of two replicas, each of which shards."""
    half, backend = world.size // 2, "nccl" if device.type == "cuda" else "gloo"
    columns = [dist.new_group(list(range(first, world.size, half)), backend=backend) for first in range(half)]
    rows = [dist.new_group(list(range(first, first + half)), backend=backend) for first in range(0, world.size, half)]
    groups, ranks = [columns[world.rank % half], rows[world.rank // half]], torch.arange(world.size).view(2, half)
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def divided(world, device, mesh=all_ranks, how=fully_shard, **sizes):
    """Return a network, each part of it and what is left wrapped by `how` over a mesh."""
    net, made = network(device, **sizes), mesh(world, device)
    for part in (*net, net):
        how(part, mesh=made)
    return net


def whole(net):
    """Return all numbers of a network's parameters."""
    return flat([each.full_tensor() if hasattr(each, "full_tensor") else each for each in net.parameters()])


def run(world, device, arguments, **given):
    """Return the parameters before and after a training."""
    net = divided(world, device, **given)
    first, handle = whole(net), gradwire.attach(net, **arguments)
    train(world, net, torch.optim.SGD(net.parameters(), lr=0.01), device, range(STEPS))
    last = whole(net)
    handle.close()
    return first, last


def compare_all(world, cases, **given):
    """Compare each case's training to the same on the CPU."""
    for arguments in cases:
        found, control = (run(world, device, arguments, **given) for device in (world.device, CPU))
        compare(world, str(arguments), found, control, bits=False)


@check()
def shards(world):
    """Gathers and reductions."""
    compare_all(world, SHARDED)


@check(least=4)
def shards_on_hosts(world):
    """Gathers and reductions with hosts of two ranks."""
    compare_all(world, ON_HOSTS)


@check(least=4)
def replicas(world):
    """Two replicas of two shards."""
    compare_all(world, HYBRID, mesh=halves)


@check()
def replicated(world):
    """torch's replicate()."""
    from torch.distributed._composable.replicate_with_fsdp import replicate  # since torch 2.10

    compare_all(world, [{"compressor": spec} for spec in ("none", "int4", "powersgd:rank=2")], how=replicate)


@check()
def gathers_keep_no_memory(world):
    """Compressed gathers need about as much memory as torch's own; outputs of modules that are done do not pile up."""
    if world.cpu:
        world.told["left out"] = "memory is counted on GPUs alone"
        return
    for arguments in MEMORY:
        torch.cuda.empty_cache()
        net = divided(world, world.device, **LARGE)
        handle = arguments and gradwire.attach(net, **arguments)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        train(world, net, optimizer, world.device, range(3), width=LARGE["width"])
        world.wait()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        train(world, net, optimizer, world.device, range(STEPS), width=LARGE["width"])
        world.wait()
        found = {"step ms": round(1000 * (time.perf_counter() - began) / STEPS, 1)}
        stats = torch.cuda.memory_stats()
        found |= {f"{kind} MiB": stats[f"{kind}_bytes.all.peak"] >> 20 for kind in ("allocated", "active", "reserved")}
        world.told[str(arguments)] = found
        if handle:
            handle.close()
        del net, optimizer, handle
    most = world.told[str(None)]["active MiB"] + (LARGE["depth"] * LARGE["width"] ** 2 * 4 >> 20) // 2
    assert all(each["active MiB"] <= most for each in world.told.values()), f"more than {most} MiB are held"
