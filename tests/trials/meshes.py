"""Trials of meshes with two axes: FSDP2 beside tensor parallelism, or with replicas. No gradient is lost."""

from dataclasses import dataclass
from random import Random

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gradwire

from .shards import forget_meshes

AXES = (("shards", "parts"), ("parts", "shards"), ("replicas", "shards"))
LOSSLESS = (("none", 1e-5), ("int8:error_feedback=true", 1e-4), ("int4", 1e-4), ("powersgd:rank=1", 1e-4))


@dataclass(frozen=True)
class Trial:
    """`widths` are even, so that two parts share them. `tolerance`: of the sum of all steps, relative to the largest."""

    seed: int
    axes: tuple[str, str]
    widths: tuple[int, ...]
    wrapped: tuple[int, ...]
    steps: int
    asked: dict[str, str]
    tolerance: float
    world_size: int = 4


def drawn(seed):
    source = Random(f"meshes {seed}")
    axes, layers = source.choice(AXES), 2 * source.randint(1, 2)
    reduce, tolerance = source.choice(LOSSLESS[:3] if "replicas" in axes else LOSSLESS[1:3])
    asked = {"reduce": reduce}
    if "replicas" in axes:
        between, other = source.choice(LOSSLESS[1:] if reduce == "none" else LOSSLESS)
        asked, tolerance = {**asked, "replicas": between}, max(tolerance, other)
    wrapped = tuple(sorted(source.sample(range(layers), source.randint(0, layers))))
    widths = tuple(2 * source.randint(5 if place < 2 else 1, 17) for place in range(layers + 1))
    return Trial(seed, axes, widths, wrapped, source.randint(2, 5), asked, tolerance)


def network(trial, mesh):
    """Pairs of linear layers, the parts of the first of each pair by rows and of the second by columns."""
    with torch.random.fork_rng():
        torch.manual_seed(trial.seed)
        model = nn.Sequential(*(nn.Linear(*pair) for pair in zip(trial.widths, trial.widths[1:], strict=False)))
    if "parts" in trial.axes:
        ways = {str(place): (RowwiseParallel if place % 2 else ColwiseParallel)() for place in range(len(model))}
        parallelize_module(model, mesh["parts"], ways)
    over = mesh if "replicas" in trial.axes else mesh["shards"]
    for place in trial.wrapped:
        fully_shard(model[place], mesh=over)
    return fully_shard(model, mesh=over)


def summed(trial, model, place, handle=None):
    """{name: sum of its whole gradients over the steps and, with a handle, of what was still owed then}, and if any was."""
    total, owed = dict.fromkeys((name for name, _ in model.named_parameters()), 0.0), False
    for step in range(trial.steps + (handle is not None)):
        if last := step == trial.steps:
            handle.swap(reduce="none")
            if handle.replicas is not None:
                handle.replicas.swap("none")
        generator = torch.Generator().manual_seed(100 * place + step)
        loss = model(torch.randn(4, trial.widths[0], generator=generator)).square().mean()
        (0.0 * loss if last else loss).backward()
        for name, parameter in model.named_parameters():
            whole = parameter.grad.full_tensor().double()
            total[name], owed = total[name] + whole, owed or (last and bool(whole.any()))
        model.zero_grad()
    return total, owed


def train(rank, world_size, trial):
    """Where the sum of all steps is other than that of torch's own communication, in words."""
    forget_meshes()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=trial.axes)
    place = rank if "replicas" in trial.axes else mesh.get_local_rank("shards")
    due, _ = summed(trial, network(trial, mesh), place)
    model = network(trial, mesh)
    handle = gradwire.attach(model, **trial.asked)
    came, owed = summed(trial, model, place, handle)
    handle.close()
    off = {name: float((due[name] - came[name]).abs().max() / due[name].abs().max()) for name in due}
    found = [f"the sum of {name} is off by {by:.2g}" for name, by in off.items() if not by <= trial.tolerance]
    return ", ".join(found if owed else [*found, "nothing was held back"])
