"""Ranks compare the values with which training starts, not those to which each rank's own ascent has moved them."""

import warnings
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from .given import compressed
from .replicate.given import local, replicate
from .test_failures import error_of

KINDS = ["attached", "hooked", "own"]
LATER = pytest.mark.skipif(torch.__version__ < "2.10", reason="replicate() has modules of its own since torch 2.10")
OF_FSDP = [pytest.param(kind, marks=LATER) for kind in ("replicated", "sharded")]


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 4))


def wrapped(kind, spec="int8", **options):
    """A model and its handle."""
    net = network()
    if kind == "replicated":
        model = replicate(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return model, gradwire.attach(model, spec, **options)
    if kind == "sharded":
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicas", "shards"))
        model = fully_shard(net, mesh=mesh)
        return model, gradwire.attach(model, replicas=spec, **options)
    return compressed(kind, net, spec, **options)


def loss_of(model, rank, step):
    inputs = torch.randn(6, 10, generator=torch.Generator().manual_seed(1000 * rank + step))
    return model(inputs).square().mean()


@contextmanager
def no_sync(model):
    """A backward inside of it sends nothing."""
    if hasattr(model, "no_sync"):
        with model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


def ascend_and_descend(model, optimizer, rank, step):
    """A step of sharpness-aware minimization with each rank's own ascent: by its gradient, where the rank has it."""
    with no_sync(model):
        loss_of(model, rank, step).backward()
    with torch.no_grad():
        old = [local(parameter).clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            by = 0.05 * (1 + rank) if parameter.grad is None else 0.05 * parameter.grad
            local(parameter).add_(by)
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    with torch.no_grad():
        for parameter, before in zip(model.parameters(), old, strict=True):
            local(parameter).copy_(before)
    optimizer.step()
    optimizer.zero_grad()


def sharpness_aware(rank, world_size, kind):
    """The parameters after steps before and after a load."""
    model, handle = wrapped(kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        if step == 2:
            handle.load_state_dict(handle.state_dict())
        ascend_and_descend(model, optimizer, rank, step)
    handle.close()
    return torch.cat([local(parameter.detach()).flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("kind", [*KINDS, *OF_FSDP])
def test_each_rank_may_have_moved_its_parameters_by_its_own_ascent(ranks, kind):
    first, second = ranks.run(sharpness_aware, 2, kind)
    assert torch.equal(first, second)


def started_apart(rank, world_size, kind, after_load):
    """The error where a rank has other parameters from the first forward on, or from a load on."""
    model, handle = wrapped(kind)
    if after_load:
        loss_of(model, rank, 0).backward()
        handle.load_state_dict(handle.state_dict())
        model.zero_grad()
    with torch.no_grad():
        local(next(model.parameters())).add_(rank)
    error = error_of(lambda: loss_of(model, rank, 1).backward())[1]
    handle.close()
    return error


@pytest.mark.parametrize("after_load", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, *OF_FSDP])
def test_other_values_from_the_start_or_a_load_on_are_refused(ranks, kind, after_load):
    for text in ranks.run(started_apart, 2, kind, after_load):
        assert "set up differently" in text
        assert "inside backward" not in text


def cleared_in_place(rank, world_size, kind):
    """The error where optimizers step inside backward and clear gradients in place."""
    model, handle = wrapped(kind)
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], 0.1)

        def stepped(_, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        parameter.register_post_accumulate_grad_hook(stepped)
    error = error_of(lambda: loss_of(model, rank, 0).backward())[1]
    handle.close()
    return error


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_inside_backward_is_named(ranks, kind):
    for text in ranks.run(cleared_in_place, 2, kind):
        assert "changed inside backward" in text
        assert "optimizer.step() after backward" in text


def unlike(rank, world_size, kind):
    """The error, and the seconds, where one rank alone looks for unused parameters."""
    options = {"find_unused_parameters": rank == 1}

    def train():
        model, _ = compressed(kind, network(), "int4:error_feedback=true", options, timeout=timedelta(seconds=20))
        loss_of(model, rank, 0).backward()

    return error_of(train)


@pytest.mark.parametrize("kind", ["own", "attached"])
def test_find_unused_parameters_on_one_rank_alone_is_refused_at_once(ranks, kind):
    for failure in ranks.run(unlike, 2, kind, expect_errors=True):
        error, text, seconds = failure
        assert error in ("ValueError", "RuntimeError")
        assert "find_unused_parameters=True" in text
        assert seconds < 15


def alone(rank, world_size):
    """The error, the seconds and the log of a rank that attaches alone, with a limit of its handle's."""
    model = TorchDDP(network())
    handle = gradwire.attach(model, "int8", timeout=timedelta(seconds=3)) if rank == 0 else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = error_of(lambda: loss_of(model, rank, 0).backward())
    if handle is None:
        return found
    handle.close()
    raise RuntimeError(f"{found[1]} after {found[2]:.0f} s")  # has the pool end the other rank's wait


def test_a_rank_that_attaches_alone_names_the_others_after_the_limit_of_its_handle(ranks):
    text = ranks.run(alone, 2, expect_errors=True)[0].message
    assert "ranks [0] have come to their first bucket" in text
    assert "ranks [1], which have not" in text
    assert int(text.split()[-2]) < 15
