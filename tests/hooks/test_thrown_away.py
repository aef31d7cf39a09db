"""Gradients that are averaged and thrown away: discarded, they leave no trace; otherwise a handle says so once."""

import copy
import warnings

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from .given import Given, gradients

SHAPES = ((40, 30), (40,), (10, 200), (3,))
STEPS, EXTRA = 4, (1, 3)  # steps, and those before which gradients are averaged and thrown away


def wrapped(spec, ours, undo=True, **options):
    options = {"bucket_cap_mb": 0.002, **options}
    if ours:
        model = gradwire.DistributedDataParallel(Given(SHAPES), compressor=spec, undo=undo, **options)
        return model, model.compression
    model = TorchDDP(Given(SHAPES), **options)
    return model, gradwire.attach(model, spec, undo=undo)


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


def counted(caught):
    return sum("were averaged and then cleared" in str(each.message) for each in caught)


def warned(rank, world_size, end, spec, stepped):
    """How many warnings some steps bring; an optimizer of torch steps in those of `stepped`, beside the end."""
    found = []
    for ours in (True, False):
        model, handle = wrapped(spec, ours)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(STEPS):
                given = copy.deepcopy(gradients(rank, step, SHAPES))
                model(given).backward()
                if step in stepped:
                    optimizer.step()
                ENDS[end][0](model, handle)
        handle.close()
        found.append(counted(caught))
    return found


@pytest.mark.parametrize("stepped", [(0,), (STEPS - 1,)], ids=["a step before", "a step after"])
@pytest.mark.parametrize("end", ENDS)
def test_gradients_that_are_cleared_with_no_optimizer_step_are_noticed_once(ranks, end, stepped):
    assert ranks.run(warned, 2, end, "topk:ratio=0.1", stepped) == [[int(ENDS[end][1])] * 2] * 2


def test_without_error_feedback_nothing_comes_back_and_nothing_is_said(ranks):
    assert ranks.run(warned, 2, "cleared", "bf16", (0,)) == [[0, 0]] * 2


def test_with_no_optimizer_of_torch_a_step_that_changes_nothing_cannot_be_known_and_nothing_is_said(ranks):
    assert ranks.run(warned, 2, "cleared", "topk:ratio=0.1", ()) == [[0, 0]] * 2


def fused(model, lr=0.1):
    """An optimizer whose steps change no parameter's version."""
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True)


def twice(model):
    """Two optimizers of one model, whose steps come in turn with each backward."""
    halves = list(model.parameters())[:2], list(model.parameters())[2:]
    return [torch.optim.AdamW(half, lr=0.0, weight_decay=0.0, fused=True) for half in halves]


UNCHANGED = {  # training in which parameters keep their numbers: what multiplies gradients, and the optimizers
    "gradients of 0": (0.0, lambda model: [fused(model)]),
    "a learning rate of 0": (1.0, lambda model: [fused(model, lr=0.0)]),
    "two optimizers": (1.0, twice),
}


def trained_unchanged(rank, world_size, case):
    """How many warnings come of steps that change nothing."""
    factor, optimizers_of = UNCHANGED[case]
    found = []
    for ours in (True, False):
        model, handle = wrapped("topk:ratio=0.1", ours)
        optimizers = optimizers_of(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(STEPS):
                model([factor * gradient for gradient in gradients(rank, step, SHAPES)]).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        handle.close()
        found.append(counted(caught))
    return found


@pytest.mark.parametrize("case", UNCHANGED)
def test_a_step_that_changes_no_number_is_a_step(ranks, case):
    assert ranks.run(trained_unchanged, 2, case) == [[0, 0]] * 2


def compiled_in_between(rank, world_size):
    """How many warnings come where, as torch.compile of torch 2.8 does it, the class's step calls no hooks any more."""
    found = []
    for ours in (True, False):
        model, handle = wrapped("topk:ratio=0.1", ours)
        optimizer = fused(model, lr=0.0)
        hooked = type(optimizer).step
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                for step in range(STEPS):
                    model(gradients(rank, step, SHAPES)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if step == 2:
                        type(optimizer).step = hooked.__wrapped__
            finally:
                type(optimizer).step = hooked
        handle.close()
        found.append(counted(caught))
    return found


def test_a_step_that_calls_no_hooks_is_a_step(ranks):
    assert ranks.run(compiled_in_between, 2) == [[0, 0]] * 2


def discriminated(rank, world_size):
    """How many warnings come where another optimizer steps after a backward whose gradients are cleared."""
    model, handle = wrapped("topk:ratio=0.1", True)
    mine, other = fused(model), torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            for optimizer in (mine, other):
                model(gradients(rank, step, SHAPES)).backward()
                optimizer.step()
                model.zero_grad()
    handle.close()
    return counted(caught)


def test_the_step_of_another_model_s_optimizer_is_none_of_this_one(ranks):
    assert ranks.run(discriminated, 2) == [1] * 2
