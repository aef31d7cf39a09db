import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

from .given import same


class Several(nn.Module):
    """Layers of two dtypes. Torch's first buckets are one a dtype, and those that it makes anew are of a layer or two."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Sequential(*(nn.Linear(24, 24) for _ in range(3)))
        self.narrow = nn.Sequential(*(nn.Linear(24, 24, dtype=torch.bfloat16) for _ in range(3)))

    def forward(self, inputs):
        return self.narrow(self.wide(inputs).bfloat16()).float()


def steps_of_a_static_graph(rank, world_size):
    model = DistributedDataParallel(Several(), static_graph=True)
    handle = gradwire.attach(model, "topk:ratio=0.1")
    counted = []
    for _ in range(3):
        model(torch.full((3, 24), rank + 1.0)).square().sum().backward()
        counted.append((handle.stats().steps, handle.state_dict()["step"]))
    handle.close()
    return counted


def test_the_first_step_of_a_static_graph_is_one_step_however_many_buckets_it_has(ranks):
    assert ranks.run(steps_of_a_static_graph, 2) == [[(1, 1), (2, 2), (3, 3)]] * 2


def steps_with_one_input(rank, world_size):
    model = DistributedDataParallel(Several(), static_graph=True)
    handle = gradwire.attach(model, "topk:ratio=0.1")
    with model.join():
        for _ in range(1 if rank == 0 else 4):
            model(torch.full((3, 24), rank + 1.0)).square().sum().backward()
    steps = handle.stats().steps
    handle.close()
    return steps


def test_a_rank_with_one_input_counts_the_others_steps_of_a_static_graph(ranks):
    assert ranks.run(steps_with_one_input, 2) == [4, 4]


def resumed_static_graph(rank, world_size, swapped_to):
    """Whether each step's averages are those of the model whose state was loaded; before the second one both are swapped."""

    def made():
        torch.manual_seed(0)
        model = DistributedDataParallel(Several(), static_graph=True, bucket_cap_mb=0.003)
        return model, gradwire.attach(model, "topk:ratio=0.05")

    def averages(model, step):
        inputs = torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * step + rank))
        model.zero_grad()
        model(inputs).square().sum().backward()
        return [each.grad.clone() for each in model.parameters()]

    (model, handle), (fresh, resumed), alike = made(), made(), []
    for step in range(8):
        if step == 4:
            resumed.load_state_dict(handle.state_dict())
        if step == 5 and swapped_to:
            handle.swap(swapped_to)
            resumed.swap(swapped_to)
        found = averages(model, step)
        alike += [same(found, averages(fresh, step))] if step >= 4 else []
    handle.close()
    resumed.close()
    return alike


@pytest.mark.parametrize("swapped_to", [None, "batched-powersgd:rank=1"])
def test_a_static_graph_resumes_to_the_bit_before_torch_has_made_its_buckets_anew(ranks, swapped_to):
    assert ranks.run(resumed_static_graph, 2, swapped_to) == [[True] * 4] * 2
