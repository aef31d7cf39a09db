import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire


class TwoTypes(nn.Module):
    """Buckets of two dtypes, all of which torch hands over in the first step of a static graph."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(6, 6)
        self.narrow = nn.Linear(6, 6, dtype=torch.bfloat16)

    def forward(self, inputs):
        return self.narrow(self.wide(inputs).bfloat16()).float()


def steps_of_a_static_graph(rank, world_size):
    model = DistributedDataParallel(TwoTypes(), static_graph=True)
    handle = gradwire.attach(model, "topk:ratio=0.1")
    counted = []
    for _ in range(3):
        model(torch.full((3, 6), rank + 1.0)).square().sum().backward()
        counted.append((handle.stats().steps, handle.state_dict()["step"]))
    handle.close()
    return counted


def test_the_first_step_of_a_static_graph_is_one_step_however_many_buckets_it_has(ranks):
    assert ranks.run(steps_of_a_static_graph, 2) == [[(1, 1), (2, 2), (3, 3)]] * 2


def steps_with_one_input(rank, world_size):
    model = DistributedDataParallel(TwoTypes(), static_graph=True)
    handle = gradwire.attach(model, "topk:ratio=0.1")
    with model.join():
        for _ in range(1 if rank == 0 else 4):
            model(torch.full((3, 6), rank + 1.0)).square().sum().backward()
    steps = handle.stats().steps
    handle.close()
    return steps


def test_a_rank_with_one_input_counts_the_others_steps_of_a_static_graph(ranks):
    assert ranks.run(steps_with_one_input, 2) == [4, 4]
