"""The handle of a replicated model saves, resumes, resizes, swaps, discards and rescales as one of DDP does."""

import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import gradwire

from .given import ddp_network, gradients, inputs, network, trained, values

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


def total(every):
    return {name: sum(each[name] for each in every) for name in every[0]}


def lacking(spec, rank, steps):
    """The handle and model after some steps, and what their averages lack of uncompressed ones."""
    exact = total(averages(ddp_network(), rank, steps))
    model = network()
    handle = gradwire.attach(model, spec)
    sent = total(averages(model, rank, steps))
    return handle, model, {name: exact[name] - sent[name] for name in exact}


def brought_back(handle, model):
    """The average of gradients of zero when all is sent that was held back."""
    handle.swap("none")
    model.zero_grad()
    (model(inputs(0, 0)) * 0).sum().backward()
    return gradients(model)


def resumed(rank, world_size, spec, folder):
    """Gradients after a resume in three ways, and without one; the names in the state."""
    model = network()
    handle = gradwire.attach(model, spec)
    averages(model, rank, range(3))
    state, gathered = handle.state_dict(), handle.gather_state_dict()
    dcp.save({"compression": gradwire.GatheredState(handle)}, checkpoint_id=folder)
    answers = [averages(model, rank, range(3, 5))]
    for load in (
        lambda other: other.load_state_dict(state),
        lambda other: other.scatter_state_dict(gathered),
        lambda other: dcp.load({"compression": gradwire.GatheredState(other)}, checkpoint_id=folder),
    ):
        model = network()
        other = gradwire.attach(model, spec)
        load(other)
        answers.append(averages(model, rank, range(3, 5)))
        other.close()
    names = sorted(state["parameters"]) == sorted(name for name, _ in model.named_parameters())
    handle.close()
    return answers, names, state["step"]


@pytest.mark.parametrize("spec", ["powersgd:rank=1,start_iter=1", "topk:ratio=0.1", "int4:rounding=stochastic"])
def test_a_resumed_training_is_the_same_to_the_bit_and_the_state_goes_by_names(ranks, spec, tmp_path):
    for answers, names, step in ranks.run(resumed, 2, spec, str(tmp_path)):
        for other in answers[1:]:
            torch.testing.assert_close(other, answers[0], rtol=0, atol=0)
        assert names
        assert step == 3


def saved(rank, world_size, wrap):
    """The state after some steps of a wrapper, and what averages lack."""
    exact = total(averages(ddp_network(), rank, range(3)))
    model = ddp_network() if wrap == "ddp" else network()
    handle = gradwire.attach(model, SPEC)
    sent = total(averages(model, rank, range(3)))
    state = handle.state_dict()
    handle.close()
    return state, {name: exact[name] - sent[name] for name in exact}


def loaded(rank, world_size, states, wrap):
    model = ddp_network() if wrap == "ddp" else network()
    handle = gradwire.attach(model, SPEC)
    handle.load_state_dict(states, resize=True) if len(states) != world_size else handle.load_state_dict(states[rank])
    found = brought_back(handle, model)
    handle.close()
    return found


@pytest.mark.parametrize(
    ("before", "after", "ranks_before", "ranks_after"),
    [
        ("replicate", "replicate", 3, 2),
        ("replicate", "replicate", 1, 2),
        ("ddp", "replicate", 2, 2),
        ("replicate", "ddp", 2, 2),
    ],
)
def test_what_was_held_back_comes_back_on_other_ranks_and_under_the_other_wrapper(
    ranks, before, after, ranks_before, ranks_after
):
    answers = ranks.run(saved, ranks_before, before)
    states, owed = [state for state, _ in answers], answers[0][1]
    assert max(each.abs().max() for each in owed.values()) > 1e-4
    for found in ranks.run(loaded, ranks_after, states, after):
        torch.testing.assert_close(found, owed, rtol=1e-4, atol=1e-6)


def swapped(rank, world_size, scale):
    """What averages lack, and what comes back of it after a swap; with a scale the residual was multiplied by it."""
    handle, model, owed = lacking(SPEC, rank, range(3))
    if scale != 1.0:
        handle.rescale(scale)
    found = brought_back(handle, model)
    handle.close()
    return {name: each * scale for name, each in owed.items()}, found


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_swap_brings_out_what_was_held_back_times_the_new_scale(ranks, scale):
    for owed, found in ranks.run(swapped, 2, scale):
        torch.testing.assert_close(found, owed, rtol=1e-4, atol=1e-6)


def discarded(rank, world_size):
    """Gradients after steps of which one is thrown away, and without that one."""
    answers = []
    for thrown_away in (True, False):
        model = network()
        handle = gradwire.attach(model, "topk:ratio=0.1", undo=True)
        averages(model, rank, range(2))
        if thrown_away:
            averages(model, rank, [7])
            handle.discard_step()
        answers.append(averages(model, rank, range(2, 4)))
        handle.close()
    return answers


def test_a_discarded_step_leaves_no_trace(ranks):
    for discarded_one, without in ranks.run(discarded, 2):
        torch.testing.assert_close(discarded_one, without, rtol=0, atol=0)


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


def copied(rank, world_size):
    """A pickled handle has what its origin holds back."""
    handle, _, _ = lacking(SPEC, rank, range(2))
    copy = pickle.loads(pickle.dumps(handle))
    ours, theirs = handle.state_dict()["parameters"], copy.state_dict()["parameters"]
    copy.close()
    handle.close()
    return ours, theirs


def test_a_copy_has_what_is_held_back(ranks):
    for ours, theirs in ranks.run(copied, 2):
        torch.testing.assert_close(theirs, ours, rtol=0, atol=0)


def frozen_later(rank, world_size):
    """Training goes on when a parameter is frozen between steps; its state is in no later checkpoint that is loaded."""
    model = network()
    handle = gradwire.attach(model, SPEC)
    trained(model, rank, 2)
    before = handle.state_dict()
    model[0].weight.requires_grad_(False)
    kept = model[0].weight.to_local().clone()
    trained(model, rank, 2, first=2)
    handle.load_state_dict(before)
    after = trained(model, rank, 1)
    state = handle.state_dict()
    handle.close()
    return (
        torch.equal(after["0.weight"], kept),
        "0.weight" in state["parameters"],
        all(map(torch.isfinite, map(torch.sum, after.values()))),
    )


def test_a_parameter_that_is_frozen_later_stays_and_leaves_the_state(ranks):
    assert ranks.run(frozen_later, 2) == [(True, False, True)] * 2


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
