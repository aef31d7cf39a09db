"""join(): ranks that stand in for others with zeros count their steps."""

import torch

import gradwire


def saved_after_join(rank, world_size):
    """Steps and buckets of the state after a `join` in which rank 0 had fewer inputs."""
    model = gradwire.DistributedDataParallel(torch.nn.Linear(6, 6), compressor="topk:ratio=0.2")
    with model.join():
        for step in range(2 + rank):
            model(torch.full((2, 6), step + 1.0)).sum().backward()
            model.zero_grad()
    state = model.compression.state_dict()
    return state["step"], state["buckets"]


def test_after_join_all_ranks_save_the_same_step(ranks):
    early, late = ranks.run(saved_after_join, 2)
    assert early == late
    assert late[0] == 3
