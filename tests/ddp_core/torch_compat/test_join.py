"""join(): ranks that run out of inputs stand in for the others with zeros, under every rule of the reducer."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from ..layers import CAP, DYNAMIC, Layers, inputs_of
from ..nets import same

OPTIONS = {
    "plain": {"bucket_cap_mb": CAP},
    "unused": DYNAMIC,
    "dropping": {**DYNAMIC, "skip_all_reduce_unused_params": True},
    "views, dropping": {**DYNAMIC, "skip_all_reduce_unused_params": True, "gradient_as_bucket_view": True},
    "dropping inside one bucket": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    "static": {"static_graph": True},
}


def train(model, rank, used, counts, weighted):
    with model.join(divide_by_initial_world_size=weighted):
        for step in range(counts[rank]):
            model.zero_grad()
            model(inputs_of(rank, step), used[step % len(used)]).square().sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=0.005)
    return [parameter.detach().clone() for parameter in model.parameters()]


def uneven(rank, world_size, counts, weighted):
    """Parameters after training with each of OPTIONS, and whether they are those of torch's."""
    results = {}
    for name, options in OPTIONS.items():
        dynamic = "find_unused_parameters" in options
        used = [(0, 1, 3), (1,), (0, 1)] if dynamic else [(0, 1, 2, 3)]
        model = gradwire.DistributedDataParallel(Layers(), **options)
        mine = train(model, rank, used, counts, weighted)
        model.compression.close()
        theirs = TorchDDP(Layers(), find_unused_parameters=dynamic)
        results[name] = mine, same(mine, train(theirs, rank, used, counts, weighted))
    return results


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("counts", [(2, 5), (4, 1), (0, 3)], ids=str)
def test_ranks_with_fewer_inputs_change_no_bit_of_what_torch_s_join_gives(ranks, counts, weighted):
    first, second = ranks.run(uneven, 2, counts, weighted)
    for name in OPTIONS:
        assert same(first[name][0], second[name][0]), name
        assert first[name][1], name
        assert second[name][1], name


def saved_after_join(rank, world_size):
    """Steps and buckets of the state after a `join` in which rank 0 had fewer inputs."""
    model = gradwire.DistributedDataParallel(torch.nn.Linear(6, 6), compressor="topk:ratio=0.2")
    with model.join():
        for step in range(2 + rank):
            model(torch.full((2, 6), step + 1.0)).sum().backward()
            model.zero_grad()
    state = model.compression.state_dict()
    model.compression.close()
    return state["step"], state["buckets"]


def test_after_join_all_ranks_save_the_same_step(ranks):
    early, late = ranks.run(saved_after_join, 2)
    assert early == late
    assert late[0] == 3
