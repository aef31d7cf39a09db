"""Hybrid sharding: any compressor among replicas, in place of torch's all-reduce."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import gradwire

from .given import network, trained

ROWS = 16 * 7


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
