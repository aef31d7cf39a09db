"""What FSDP2 can be set to, trained as without gradwire; and what is refused, with the way out."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import gradwire

from ...ddp_core.errors import message_of
from .given import divided, mesh_of, network, whole


def left_out(rank, world_size, reduce, unused):
    """Two branches of one module, of which each step takes one."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, inputs, name):
            return getattr(self, name)(inputs).square().sum()

    torch.manual_seed(0)
    model = fully_shard(Branches(), mesh=mesh_of(world_size))
    if unused:
        model.set_reduce_scatter_unused_params(True)
    handle = gradwire.attach(model, reduce=reduce)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name in ("left", "right", "left"):
        model(torch.ones(2, 6) * (rank + 1), name).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.close()
    return whole(model)


@pytest.mark.parametrize(("reduce", "unused"), [("none", False), ("int8", False), ("int8:error_feedback=true", True)])
def test_parameters_may_be_left_out_where_nothing_is_remembered_or_torch_sends_zeros(ranks, reduce, unused):
    if unused and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("this torch does not send zeros")
    exact, ours = (ranks.run(left_out, 2, each, unused)[0] for each in ("none", reduce))
    torch.testing.assert_close(ours, exact, rtol=5e-2, atol=5e-2)


def twice():
    model = network(2)
    gradwire.attach(model, reduce="int8")
    gradwire.attach(model)


REFUSED = {  # what is done, and what the message says
    "twice": (twice, "somebody communicates for 3 of its 3 sharded modules already"),
    "a compressor as for DDP": (
        lambda: gradwire.attach(network(2), "powersgd:rank=4"),
        "attach(fsdp_model, gather='int8', reduce='int8', optimizer=optimizer)",
    ),
    "gradients by powersgd": (lambda: gradwire.attach(network(2), reduce="powersgd:rank=4"), "no rank has whole"),
    "weights at random": (lambda: gradwire.attach(network(2), gather="int8:rounding=stochastic"), "to the nearest"),
    "no replicas": (lambda: gradwire.attach(network(2), replicas="powersgd:rank=4"), "a mesh of two dimensions"),
    "a bare module": (
        lambda: gradwire.attach(nn.Linear(2, 2), gather="int8"),
        "wrap it first, or fully_shard it, then attach",
    ),
    "left out": (lambda: left_out(torch.distributed.get_rank(), 2, "int4", unused=False), "error_feedback=false"),
}


def refused(rank, world_size, case):
    return message_of(REFUSED[case][0])


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_what_to_do(ranks, case):
    for answer in ranks.run(refused, 2, case):
        assert REFUSED[case][1] in answer


def divided_after(rank, world_size, arguments, replicas):
    """Gradients by a divisor of the user's that is set before attach, after it, and after a first step; the exact ones."""
    mesh = init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))
    found = []
    for moment in (None, 0, 1, 2):
        model = network(world_size, mesh=mesh if replicas > 1 else None)
        model = divided(model) if moment in (None, 0) else model
        handle = gradwire.attach(model, **arguments) if moment is not None else None
        for number in range(2):
            if moment == number + 1:
                for module in (model[0], model[2], model):
                    module.set_gradient_divide_factor(7.0)
            model.zero_grad()
            model(torch.full((4, 7), rank + 1.0)).square().mean().backward()
        found.append({name: each.grad.full_tensor() for name, each in model.named_parameters()})
        if handle is not None:
            handle.close()
        factors = [module._get_fsdp_state()._fsdp_param_group.gradient_divide_factor for module in (model[0], model)]
        assert factors == [7.0, 7.0]
    return found


@pytest.mark.parametrize(
    ("arguments", "replicas", "tolerance"),
    [
        ({}, 1, 1e-5),
        ({"reduce": "int8"}, 1, 3e-2),
        ({"replicas": "none", "reduce": "none"}, 2, 1e-5),
    ],
)
def test_a_divisor_counts_whenever_it_is_set(ranks, arguments, replicas, tolerance):
    for exact, *ours in ranks.run(divided_after, 2 * replicas, arguments, replicas):
        for each in ours:
            torch.testing.assert_close(each, exact, rtol=tolerance, atol=tolerance)


def refused_divisor(rank, world_size):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = network(world_size, mesh=mesh)
    handle = gradwire.attach(model, replicas="none")
    divided(model)
    with pytest.raises(ValueError, match="reduce='none', too"):
        model(torch.ones(4, 7)).sum().backward()
    handle.close()


def test_a_divisor_is_refused_where_torch_sums_over_shards(ranks):
    ranks.run(refused_divisor, 2)
