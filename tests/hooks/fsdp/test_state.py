"""What is held back of sharded parameters: saved by name, loaded, resized, swapped, taken back; and ranks that fail."""

import os
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire
from gradwire.ddp_core.averaging import steps as stepping
from gradwire.hooks.fsdp.state import merged

from ...ddp_core.errors import message_of
from ..given import Given
from .given import SHAPES, given_model, gradients, mean_gradients, network, trained


def attached(world_size, reduce="int4"):
    model = given_model(world_size)
    return model, gradwire.attach(model, reduce=reduce)


def steps(model, rank, first, last):
    return [mean_gradients(model, gradients(rank, step)) for step in range(first, last)]


def saved_after_a_swap(rank, world_size, steps_after, folder):
    """The sum of all means where a state goes through a file so many steps after a swap to sums without residuals; and
    what a load through torch.distributed.checkpoint raises, and one of a state from before error feedback."""
    model, handle = attached(world_size)
    means = steps(model, rank, 0, 2)
    handle.swap(reduce="none")
    means += steps(model, rank, 2, 2 + steps_after)
    state, (again, other) = handle.state_dict(), attached(world_size, "none")
    never, through = other.state_dict(), other.state_dict()
    dcp.save({"compression": state}, checkpoint_id=folder)
    dcp.load({"compression": through}, checkpoint_id=folder)
    messages = [message_of(other.load_state_dict, through), message_of(handle.load_state_dict, never)]
    other.load_state_dict(state)
    means += steps(again, rank, 2 + steps_after, 4)
    return {name: sum(mean[name] for mean in means) for name in means[0]}, messages


@pytest.mark.parametrize("steps_after", [0, 1])
def test_a_state_of_just_after_a_swap_brings_out_what_was_held_back_before_it(ranks, steps_after, tmp_path):
    for total, (through_dcp, without) in ranks.run(saved_after_a_swap, 2, steps_after, str(tmp_path)):
        assert "of its 4 tensors" in through_dcp
        assert without == ""
        for module, shapes in enumerate(SHAPES):
            for place in range(len(shapes)):
                expected = sum(gradients(rank, step)[module][place] for rank in range(2) for step in range(4)) / 2
                torch.testing.assert_close(total[f"parts.{module}.p{place}"], expected, rtol=0, atol=1e-4)


class Some(Given):
    """A model that leaves a parameter out where its gradient is None."""

    def forward(self, gradients):
        used = [pair for pair in zip(self.parameters(), gradients, strict=True) if pair[1] is not None]
        return sum((parameter * gradient).sum() for parameter, gradient in used)


def left_out_after_a_swap(rank, world_size):
    """The sum of all that came of the parameters of a module, one of which the first step after a swap leaves out."""
    model = fully_shard(Some(SHAPES[0]), mesh=init_device_mesh("cpu", (world_size,)))
    handle, total = gradwire.attach(model, reduce="int4"), dict.fromkeys(("p0", "p1"), 0.0)
    for step in range(4):
        given = gradients(rank, step)[0]
        if step == 2:
            handle.swap(reduce="none")
            given[1] = None
        model(given).backward()
        for name, parameter in model.named_parameters():
            total[name] = total[name] + (0.0 if parameter.grad is None else parameter.grad.full_tensor())
        model.zero_grad()
    handle.close()
    return total


def test_what_was_held_back_before_a_swap_waits_for_a_step_that_uses_all_parameters(ranks):
    for total in ranks.run(left_out_after_a_swap, 2):
        for place, steps_used in enumerate(((0, 1, 2, 3), (0, 1, 3))):
            expected = sum(gradients(rank, step)[0][place] for rank in range(2) for step in steps_used) / 2
            torch.testing.assert_close(total[f"p{place}"], expected, rtol=0, atol=1e-4)


def deserted(rank, world_size):
    model = network(world_size)
    gradwire.attach(model)
    trained(model, rank, 1)
    if rank == 1:
        os._exit(1)
    model(torch.ones(4, 7))


def test_when_a_rank_dies_in_forward_the_others_raise(ranks):
    answers = ranks.run(deserted, 3, expect_errors=True, timeout=40)
    assert "exit code 1" in answers[1].fate
    assert all(answers[rank].seconds < 30 for rank in (0, 2))


def of_part(rank, ranks, part, number):
    """A state that holds back one number."""
    inside = {"reduce": "int4", "step": 1, "parameters": {"w": {"residual": torch.tensor([number])}}}
    return {f"rank {rank} of {ranks}{part}": inside}


def test_on_another_number_of_ranks_each_part_takes_the_mean_of_its_own_states():
    parts = [f", part {part} of 2" for part in range(2)]
    states = [of_part(rank, 3, part, 10.0 * place + rank) for place, part in enumerate(parts) for rank in range(3)]
    for place, part in enumerate(parts):
        found = merged(states, part.removeprefix(", "))
        assert found["parameters"]["w"]["residual"].tolist() == [10.0 * place + 1]
    for wrong, part in ((states, ""), (states[1:], "part 0 of 2"), ([*states, states[0]], "part 0 of 2")):
        with pytest.raises(ValueError, match="each of them once"):
            merged(wrong, part)


def interrupted(gradient):
    raise ArithmeticError("on purpose")


def saved_after_a_backward_that_broke_off(rank, world_size):
    """The steps in a state that another thread saves while gradients of a module are on their way that nobody awaits."""
    model = network(world_size)
    handle, states = gradwire.attach(model, reduce="int4"), []
    trained(model, rank, 2)
    model[1].register_forward_hook(lambda module, inputs, outputs: outputs.register_hook(interrupted) and None)
    with pytest.raises(ArithmeticError):
        trained(model, rank, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stepping, "QUIET", 0.3)
        thread = threading.Thread(target=lambda: states.append(handle.state_dict()), daemon=True)
        thread.start()
        thread.join(20)
    handle.close()
    return [inside["step"] for state in states for inside in state.values()]


def test_a_save_waits_for_no_backward_that_broke_off(ranks):
    assert ranks.run(saved_after_a_backward_that_broke_off, 2) == [[2], [2]]
