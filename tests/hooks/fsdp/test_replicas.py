"""Hybrid sharding: any compressor among replicas, in place of torch's all-reduce."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import gradwire

from .given import given_model, gradients, mean_gradients, network, trained


def hybrid(**options):
    return network(4, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), **options)


def both(rank, world_size, arguments):
    """Parameters after the same training with torch's communication and with ours."""
    theirs = trained(hybrid(), rank)
    model = hybrid()
    handle = gradwire.attach(model, **arguments)
    ours = trained(model, rank)
    rounds = handle.replicas and handle.replicas.stats().last.traffic.rounds
    handle.close()
    again = trained(model, rank, steps=1)
    return theirs, ours, rounds, again


@pytest.mark.parametrize(
    ("arguments", "tolerance"),
    [
        ({}, 1e-6),
        ({"replicas": "none"}, 1e-6),
        ({"replicas": "none", "gather": "none", "reduce": "none"}, 1e-6),
        ({"replicas": "powersgd:rank=4", "reduce": "int8"}, 3e-2),
    ],
    ids=str,
)
def test_it_trains_as_torchs_hybrid_sharding_does(ranks, arguments, tolerance):
    answers = ranks.run(both, 4, arguments)
    for theirs, ours, rounds, again in answers:
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(ours, answers[0][1], rtol=0, atol=0)
        assert all(map(torch.isfinite, map(torch.sum, again.values())))
        assert (rounds or 0) >= (3 if "replicas" in arguments else 0)


def resumed(rank, world_size):
    """The keys of a state, and whether steps after a resume are what they are without one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    arguments = {"gather": "int8", "reduce": "int4", "replicas": "topk:ratio=0.1"}
    models = [given_model(mesh=mesh) for _ in range(2)]
    first, second = (gradwire.attach(model, **arguments) for model in models)
    for step in range(3):
        mean_gradients(models[0], gradients(rank, step))
    state = first.state_dict()
    second.load_state_dict(state)
    alike = []
    for step in range(3, 5):
        one, other = (mean_gradients(model, gradients(rank, step)) for model in models)
        alike += [torch.equal(one[name], other[name]) for name in one]
    first.close()
    second.close()
    return list(state), all(alike)


def test_what_is_held_back_among_shards_and_among_replicas_comes_back_to_the_bit(ranks):
    answers = ranks.run(resumed, 4)
    assert [keys for keys, _ in answers] == [[f"rank {rank} of 4"] for rank in range(4)]
    assert all(alike for _, alike in answers)
