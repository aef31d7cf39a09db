"""The handle of a replicated model saves, resumes, resizes, swaps, discards and rescales as one of DDP does."""

import torch
import torch.distributed as dist

import gradwire

from .given import ddp_network, gradients, inputs, network, values

SPEC = "powersgd:rank=1"


def averages(model, rank, steps):
    """{name: gradient} of some steps, which change no parameter."""
    found = []
    for step in steps:
        model.zero_grad()
        model(inputs(rank, step)).square().mean().backward()
        found.append(gradients(model))
    model.zero_grad()
    return found


def scaled(rank, world_size):
    """By wrapper: parameters after steps under a scaler that the handle follows, of which one overflows on rank 1."""
    answers = []
    for make in (network, ddp_network):
        model = make()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = gradwire.attach(model, SPEC, scaler=scaler)
        for step in range(5):
            loss = model(inputs(rank, step)).square().mean()
            scaler.scale(loss * float("inf") if step == 2 and rank == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        answers.append((values(model), scaler.get_scale()))
        handle.close()
    return answers


def test_steps_that_overflow_and_scales_that_change_are_as_under_ddp(ranks):
    for (ours, scale), (theirs, scale_of_ddp) in ranks.run(scaled, 2):
        assert scale == scale_of_ddp != 1024.0
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def groups_apart(rank, world_size):
    """Two pairs of ranks, each with a group of its own as mesh: gradients are averaged within each."""
    meshes = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("apart", "dp"))
    model = network(mesh=meshes["dp"])
    handle = gradwire.attach(model, "none")
    found = averages(model, rank, [0])[0]
    handle.close()
    return found


def test_a_mesh_of_some_ranks_averages_among_these_alone(ranks):
    answers = ranks.run(groups_apart, 4)
    torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=0)
    torch.testing.assert_close(answers[2], answers[3], rtol=0, atol=0)
    assert not torch.equal(answers[0]["0.weight"], answers[2]["0.weight"])
