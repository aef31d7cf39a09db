"""Something fails while updates are under way: an error says which parameters were updated, and none is half."""

from datetime import timedelta

import pytest
import torch

from gradwire.ddp_core.overlap.partial_step import PartialStep

from ...faulty import Fault, faulty
from ..errors import message_of, warned
from .overlapped import Layers, Setting

GOOD = 3  # steps before the one that fails


def numbers(setting):
    return [parameter.detach().clone() for parameter in setting.model.parameters()]


def history(rank, link=None):
    """The parameters after each step of a training that nothing disturbs."""
    setting = Setting(rank, "synchronous", net=Layers, link=link, optimizer=torch.optim.SGD)
    found = [numbers(setting)]
    for _ in range(GOOD + 2):
        setting.step()
        found.append(numbers(setting))
    setting.end()
    return found


def failing(rank, world_size):
    """What a rank raises where a request of its last step fails; and whether each parameter is as before or after it."""
    steps, probe = history(rank), Setting(rank, "priority", net=Layers, link=None)
    probe.end()
    first = len(probe.model.reducer.assignment.sending)  # of the first step, whose buckets have the model's order
    link = faulty(Fault("break", rank=1, turn=GOOD * first + 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADWIRE_SHARED_MEMORY", "0")
        options = {"optimizer": torch.optim.SGD, "timeout": timedelta(seconds=30)}
        setting = Setting(rank, "priority", net=Layers, link=link, **options)
        raised, step = [], 0
        try:
            for _ in range(GOOD + 1):
                setting.step()
                step += 1
            setting.optimizer.drain()
        except RuntimeError as error:
            raised.append(str(error))
    found = numbers(setting)  # nobody waits any more
    after, before = steps[step], steps[step - 1]
    names = [name for name, _ in setting.model.module.named_parameters()]
    stands = [
        "after" if torch.equal(x, a) else "before" if torch.equal(x, b) else "?"
        for x, a, b in zip(found, after, before, strict=True)
    ]
    raised.append(message_of(setting.loss))
    return raised, dict(zip(names, stands, strict=True)), setting.pending


def test_a_reply_that_does_not_come_leaves_each_parameter_before_or_after_its_step(ranks):
    for (raised, then), stands, pending in ranks.run(failing, 2):
        assert "each parameter is as before or as after its update" in raised
        assert "Load a checkpoint" in raised
        assert set(stands.values()) <= {"before", "after"}
        made, _, others = raised.partition("; it was not made for ")
        for name, stand in stands.items():
            assert name in (others if stand == "before" else made)
        assert "before" in stands.values()
        assert "the ranks are no longer in step" in then
        assert not pending


def raising_step(rank, world_size):
    """An optimizer that raises in a late update."""
    setting = Setting(rank, "priority", net=Layers, optimizer=torch.optim.SGD)
    setting.step()
    setting.optimizer.drain()
    run, calls = PartialStep.run, []

    def second_raises(stepper, settings, members):
        calls.append(1)
        if len(calls) == 3:
            raise ArithmeticError("on purpose")
        run(stepper, settings, members)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartialStep, "run", second_raises)
        setting.step()
        with pytest.raises(RuntimeError, match=r"may be half updated.*on purpose.*each parameter is as before"):
            setting.optimizer.drain()
    return setting.pending


def test_an_optimizer_that_raises_in_a_late_update_ends_training(ranks):
    assert ranks.run(raising_step, 2) == [False, False]


class OnPurpose(Exception):
    """A user's own error."""


def raising_backward(rank, world_size, order, layer):
    """A user's error in backward, once a layer's gradient is there: which step parameters stand at, and what comes next."""
    steps, setting = history(rank), Setting(rank, order, net=Layers, link=None, optimizer=torch.optim.SGD)
    raises = []

    def hook(_):
        if raises:
            raise OnPurpose

    setting.model.module[layer].weight.register_hook(hook)
    for _ in range(GOOD):
        setting.step()
    raises.append(True)
    with pytest.raises(OnPurpose):
        setting.step()
    pending, after_it = setting.pending, numbers(setting)
    raises.clear()
    refusal = message_of(setting.step)
    setting.model.compression.close()
    return pending, all(map(torch.equal, after_it, steps[GOOD])), refusal


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("order", ["priority", "synchronous"])
def test_an_error_in_backward_leaves_all_parameters_at_the_step_before_and_the_next_step_says_what_to_do(
    ranks, order, layer
):
    for pending, stands, told in ranks.run(raising_backward, 2, order, layer):
        assert not pending
        assert stands
        assert "after a backward that raised an error" in told
        assert "no longer in step, so load a checkpoint" in told


def used_unseen(rank, world_size):
    """What is said where a forward uses parameters that it does not take from torch's functions."""

    class Hidden(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.unseen, self.seen = (torch.nn.Parameter(torch.randn(32, 16)) for _ in range(2))

        def forward(self, inputs):
            with torch._C.DisableTorchFunctionSubclass():  # as an extension in C++ does
                hidden = torch.nn.functional.linear(inputs, self.unseen)
            return hidden + torch.nn.functional.linear(inputs, self.seen)

    with warned("was not seen to use them") as texts:
        setting = Setting(rank, "priority", net=Hidden, slice_mb=0.001)
        for _ in range(4):
            setting.step()
    setting.end()
    return len(texts)


def test_a_forward_that_uses_parameters_unseen_is_told_once(ranks):
    assert ranks.run(used_unseen, 2) == [1, 1]
