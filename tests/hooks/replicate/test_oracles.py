"""torch's `replicate` with gradwire, against the same compressor under torch's DDP, and among some of the ranks."""

import pytest
import torch
import torch.distributed as dist

import gradwire

from .given import ddp_network, gradients, inputs, network, trained


def both(rank, world_size, spec):
    """Parameters and bytes with a compressor, under replicate and under torch's DDP, whose buckets are others."""
    answers = []
    for make in (network, ddp_network):
        model = make()
        handle = gradwire.attach(model, spec)
        answers.append((trained(model, rank, 5), handle.metrics()["total_sent_bytes"], handle.metrics()["steps"]))
        handle.close()
    return answers


@pytest.mark.parametrize("spec", ["bf16", "powersgd:rank=2,start_iter=2", "topk:ratio=0.2", "onebit"])
def test_a_compressor_does_what_it_does_under_ddp(ranks, spec):
    answers = ranks.run(both, 2, spec)
    for (ours, sent, steps), (theirs, sent_by_ddp, steps_of_ddp) in answers:
        by_parameter = spec.startswith(("bf16", "powersgd"))  # others compress what a bucket has together
        tolerance = 1e-5 if by_parameter else 0.05
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(ours, answers[0][0][0], rtol=0, atol=0)  # alike on all ranks
        assert steps == steps_of_ddp == 5
        assert sent == sent_by_ddp or not by_parameter


def groups_apart(rank, world_size):
    """Two pairs of ranks, each with a group of its own as mesh: gradients are averaged within each."""
    meshes = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("apart", "dp"))
    model = network(mesh=meshes["dp"])
    handle = gradwire.attach(model, "none")
    model(inputs(rank, 0)).square().mean().backward()
    found = gradients(model)
    handle.close()
    return found


def test_a_mesh_of_some_ranks_averages_among_these_alone(ranks):
    answers = ranks.run(groups_apart, 4)
    torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=0)
    torch.testing.assert_close(answers[2], answers[3], rtol=0, atol=0)
    assert not torch.equal(answers[0]["0.weight"], answers[2]["0.weight"])
