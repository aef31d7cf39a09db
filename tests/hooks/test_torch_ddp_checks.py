"""What torch's DDP does not do with a communication hook is refused: averages would be wrong, and nobody would say so."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from .given import compressed

WIDTH = 4


def joined(rank, world_size, kind, divide):
    """The gradient of rank 1's second step, of which rank 0 has no inputs."""
    torch.manual_seed(0)
    if kind == "own":
        model = gradwire.DistributedDataParallel(nn.Linear(WIDTH, 1))
    else:
        net = nn.Linear(WIDTH, 1)
        model = gradwire.DistributedDataParallel(net) if kind == "hook on own" else TorchDDP(net)
        model.register_comm_hook(None, gradwire.comm_hook("none"))
    try:
        with Join([model], divide_by_initial_world_size=divide):
            for _ in range(1 + rank):
                model.zero_grad()
                model(torch.ones(1, WIDTH)).sum().backward()
    except ValueError as error:
        return str(error)
    return model.module.weight.grad[0, 0].item()


@pytest.mark.parametrize("kind", ["attached", "hook on own"])
def test_join_that_divides_by_the_ranks_with_inputs_is_refused(ranks, kind):
    for text in ranks.run(joined, 2, kind, False):
        assert "divide_by_initial_world_size" in text


def test_join_divides_as_it_is_told(ranks):
    assert ranks.run(joined, 2, "own", False)[1] == 1.0
    assert ranks.run(joined, 2, "own", True)[1] == 0.5
    assert ranks.run(joined, 2, "attached", True)[1] == 0.5


class TwoOutputs(nn.Module):
    """Two layers, each behind an output."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, inputs):
        return self.first(inputs), self.second(inputs)


def leaves_an_output_out(rank, world_size, kind):
    """The gradient of the layer whose output only rank 0's loss has."""
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    model, _ = compressed(kind, TwoOutputs(), "none", options)
    outputs = model(torch.ones(1, WIDTH))
    sum(outputs[: world_size - rank]).sum().backward()
    return model.module.second.weight.grad[0, 0].item()


@pytest.mark.parametrize("kind", ["own", "attached"])
def test_an_output_that_the_loss_of_a_rank_leaves_out_is_no_cleared_gradient(ranks, kind):
    assert ranks.run(leaves_an_output_out, 2, kind) == [0.5, 0.5]


def python_reduced(rank, world_size):
    before = torch._dynamo.config.optimize_ddp
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        with pytest.raises(ValueError, match="python_reducer"):
            gradwire.attach(TorchDDP(nn.Linear(WIDTH, 1)), "none")
    finally:
        torch._dynamo.config.optimize_ddp = before


def test_the_python_reducer_is_refused(ranks):
    ranks.run(python_reduced, 1)
