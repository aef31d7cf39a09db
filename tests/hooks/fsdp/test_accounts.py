"""What FSDP2 shards, against an account by hand: all batches in one process, in float64, without torch's FSDP."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import gradwire

from ...ddp_core.errors import message_of
from .given import mesh_of

RATE, STEPS = 0.2, 2


class Tied(nn.Module):
    """Two modules that share a weight, and one of their own in between."""

    def __init__(self):
        super().__init__()
        self.first, self.between, self.last = nn.Linear(7, 7, bias=False), nn.Linear(7, 7), nn.Linear(7, 7, bias=False)
        self.last.weight = self.first.weight

    def forward(self, inputs):
        return self.last(self.between(self.first(inputs)).tanh())


def bare():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 2))


def narrow():
    """Parameters whose first dimension is smaller than the number of ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 1), nn.Linear(1, 3), nn.Linear(3, 2, bias=False))


def tied():
    torch.manual_seed(0)
    return Tied()


def batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, 7, generator=generator, dtype=torch.float64)


def loss_of(model, inputs):
    return (model(inputs) - 0.3).square().mean()


def fewer_rows(world_size):
    model, mesh = narrow(), mesh_of(world_size)
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    return model


def shared_within(world_size):
    """A weight of two modules that is in one group: that of a parent of both."""
    model, mesh = tied(), mesh_of(world_size)
    fully_shard(model.between, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shared_by_a_list(world_size):
    model, mesh = tied(), mesh_of(world_size)
    fully_shard([model.first, model.last], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ignoring(world_size):
    model, mesh = bare(), mesh_of(world_size)
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh, ignored_params={model[2].weight})


def backward(model, rank, step):
    loss_of(model, batch(rank, step).to(next(model.parameters()).dtype)).backward()


CASES = {  # ranks, the sharded model, the same without shards
    "ignored parameters": (2, ignoring, bare),
    "a weight shared within a group": (2, shared_within, tied),
    "a weight shared by a list of modules": (2, shared_by_a_list, tied),
    "fewer rows than ranks": (4, fewer_rows, narrow),
}
ARGUMENTS = [({}, 1e-5), ({"gather": "bf16", "reduce": "bf16"}, 3e-2), ({"gather": "int4", "reduce": "int8"}, 3e-2)]


def account(case, rank):
    """The parameters of `rank` after the steps: the mean gradient of all ranks, by itself."""
    ranks, _, model = CASES[case]
    model = model().double()
    own = {name: each.detach().clone() for name, each in model.named_parameters()}  # of ignored parameters
    for step in range(STEPS):
        copies = [copy.deepcopy(model) for _ in range(ranks)]
        for place, each in enumerate(copies):
            if case == "ignored parameters":
                each.get_parameter("2.weight").data.copy_(model.weights[place] if step else own["2.weight"])
            backward(each, place, step)
        if case == "ignored parameters":
            given = [each.get_parameter("2.weight") for each in copies]
            model.weights = [(each - RATE * each.grad).detach() for each in given]
        for name, parameter in model.named_parameters():
            gradients = [each.get_parameter(name).grad for each in copies]
            parameter.data.sub_(RATE * sum(gradients) / ranks)
    if case == "ignored parameters":
        model.get_parameter("2.weight").data.copy_(model.weights[rank])
    return {name: each.detach() for name, each in model.named_parameters()}


def trained(rank, world_size, case):
    """The parameters after the steps by gradwire, for each way to communicate, and those of the account."""
    _, make, _ = CASES[case]
    found = []
    for arguments, _ in ARGUMENTS:
        model = make(world_size)
        handle = gradwire.attach(model, **arguments)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for step in range(STEPS):
            backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        handle.close()
        model.reshard()
        numbers = {name: each.detach() for name, each in model.named_parameters()}
        found.append({n: (each.full_tensor() if isinstance(each, DTensor) else each) for n, each in numbers.items()})
    return found, account(case, rank)


@pytest.mark.parametrize("case", CASES)
def test_settings_train_as_an_account_in_float64(ranks, case):
    for found, expected in ranks.run(trained, CASES[case][0], case, timeout=120):
        for numbers, (arguments, tolerance) in zip(found, ARGUMENTS, strict=True):
            assert numbers.keys() == expected.keys()
            for name, each in numbers.items():
                torch.testing.assert_close(each.double(), expected[name], rtol=0, atol=tolerance, msg=f"{arguments}")


def shared_between_groups(rank, world_size):
    """What is raised where two groups would have the same weight."""
    model, mesh = tied(), mesh_of(world_size)
    for part in (model.first, model.last, model):
        fully_shard(part, mesh=mesh)
    gradwire.attach(model, gather="int8", reduce="int8")
    return message_of(backward, model, rank, 0)


@pytest.mark.skipif(torch.__version__ < "2.15", reason="an older torch trains two weights")
def test_a_weight_shared_between_groups_is_refused_by_torch_which_says_what_to_do(ranks):
    for message in ranks.run(shared_between_groups, 2):
        assert "fully_shard([module_a, module_b])" in message
