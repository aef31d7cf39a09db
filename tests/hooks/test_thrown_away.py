"""Gradients that are averaged and thrown away: discarded, they leave no trace; otherwise a handle says so once."""

import copy
import warnings

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from .given import Given, average, gradients
from .test_handle import LOSSY, same

SHAPES = ((40, 30), (40,), (10, 200), (3,))
STEPS, EXTRA = 5, (2, 4)  # steps, and those before which gradients are averaged and thrown away


def wrapped(spec, ours, **options):
    options = {"bucket_cap_mb": 0.002, **options}
    if ours:
        model = gradwire.DistributedDataParallel(Given(SHAPES), compressor=spec, **options)
        return model, model.compression
    model = TorchDDP(Given(SHAPES), **options)
    return model, gradwire.attach(model, spec)


def trained(rank, spec, ours, act, **options):
    """Averages, and the state: `act(model, handle)` before some steps."""
    model, handle = wrapped(spec, ours, **options)
    averages = []
    for step in range(STEPS):
        if step in EXTRA:
            act(model, handle)
        averages.append(average(model, gradients(rank, step, SHAPES)))
    state = handle.state_dict()
    handle.close()
    return averages, state["parameters"]


def discarding(rank, world_size, ours, saving, options):
    """Whether training with discarded steps is like one without; and like one with steps that are kept."""

    def throw(model, handle, *, discard):
        average(model, gradients(rank, 50, SHAPES))
        if rank in saving:
            handle.state_dict()
        if discard:
            handle.discard_step()

    results = {}
    for spec in LOSSY:
        without = trained(rank, spec, ours, lambda *_: None, **options)
        discarded = trained(rank, spec, ours, lambda *given: throw(*given, discard=True), **options)
        kept = trained(rank, spec, ours, lambda *given: throw(*given, discard=False), **options)
        results[spec] = same(without, discarded), same(without, kept)
    return results


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
@pytest.mark.parametrize("saving", [(), (0,)])
@pytest.mark.parametrize("ours", [True, False])
def test_a_discarded_step_changes_no_bit_of_later_ones_whoever_saves(ranks, ours, saving, options):
    for results in ranks.run(discarding, 2, ours, saving, options):
        assert results == dict.fromkeys(LOSSY, (True, False))


def saved_after_discarding(rank, world_size):
    """Whether a save is what it was before the step that was discarded, but for the count."""
    model, handle = wrapped("topk:ratio=0.1", ours=True)
    for step in range(3):
        average(model, gradients(rank, step, SHAPES))
    before = handle.state_dict()
    average(model, gradients(rank, 3, SHAPES))
    between = handle.state_dict()
    handle.discard_step()
    after = handle.state_dict()
    handle.close()
    return same(before["parameters"], after["parameters"]), same(between["parameters"], after["parameters"])


def test_a_save_after_discarding_lacks_the_step(ranks):
    assert ranks.run(saved_after_discarding, 2) == [(True, False)] * 2


def refused(rank, world_size):
    """What discarding raises with no step, and after what settles one."""
    model, handle = wrapped("topk:ratio=0.1", ours=False)
    messages = []
    for act in (lambda: None, lambda: handle.rescale(2.0), lambda: handle.swap("onebit")):
        if messages:
            average(model, gradients(rank, len(messages), SHAPES))
        act()
        with pytest.raises(RuntimeError) as caught:
            handle.discard_step()
        messages.append(str(caught.value))
    handle.close()
    return messages


def test_a_step_that_is_settled_cannot_be_discarded(ranks):
    for messages in ranks.run(refused, 2):
        assert all(message.startswith("there is no step to discard") for message in messages)


def descend(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.1)
    model.zero_grad()


def by_data(model):
    for parameter in model.parameters():
        parameter.data.sub_(parameter.grad, alpha=0.1)
    model.zero_grad()


ENDS = {  # how a step ends: whether that is noticed
    "cleared": (lambda model, _: model.zero_grad(), True),
    "discarded": (lambda model, handle: (model.zero_grad(), handle.discard_step()), False),
    "descent": (lambda model, _: descend(model), False),
    "descent by data": (lambda model, _: by_data(model), False),
    "accumulated": (lambda model, _: None, False),
}


def warned(rank, world_size, end, spec):
    """How many warnings some steps bring."""
    found = []
    for ours in (True, False):
        model, handle = wrapped(spec, ours)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(4):
                given = copy.deepcopy(gradients(rank, step, SHAPES))
                model(given).backward()
                ENDS[end][0](model, handle)
        handle.close()
        found.append(sum("were averaged and then cleared" in str(each.message) for each in caught))
    return found


@pytest.mark.parametrize("end", ENDS)
def test_gradients_that_are_cleared_with_no_optimizer_step_are_noticed_once(ranks, end):
    assert ranks.run(warned, 2, end, "topk:ratio=0.1") == [[int(ENDS[end][1])] * 2] * 2


def test_without_error_feedback_nothing_comes_back_and_nothing_is_said(ranks):
    assert ranks.run(warned, 2, "cleared", "bf16") == [[0, 0]] * 2
