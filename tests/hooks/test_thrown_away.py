"""Gradients that are averaged and thrown away: discarded, they leave no trace; otherwise a handle says so once."""

import copy
import logging
import logging.handlers
import warnings

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from .given import Given, average, gradients
from .test_handle import LOSSY, same

SHAPES = ((40, 30), (40,), (10, 200), (3,))
STEPS, EXTRA = 4, (1, 3)  # steps, and those before which gradients are averaged and thrown away


def wrapped(spec, ours, undo=True, **options):
    options = {"bucket_cap_mb": 0.002, **options}
    if ours:
        model = gradwire.DistributedDataParallel(Given(SHAPES), compressor=spec, undo=undo, **options)
        return model, model.compression
    model = TorchDDP(Given(SHAPES), **options)
    return model, gradwire.attach(model, spec, undo=undo)


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


@pytest.mark.parametrize(
    ("ours", "saving", "options"), [(True, (), {"find_unused_parameters": True}), (True, (0,), {}), (False, (0,), {})]
)
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


FACTORS = [1.0, 1.0, 1e6, 1.0, 1e6, 1.0, float("inf"), 1.0]  # of gradients; large ones are discarded


def residuals(handle):
    """Copies, not by a save: what has been saved is not written over."""
    return [leaf.flat.clone() for _, bucket in handle.averager.memory.live for leaf in bucket.leaves.residuals]


def discarded_without_a_copy(rank, world_size, spec, ours, undo):
    """Residuals after each step that does not count: zero, or those before it; the log; the averages' sizes."""
    lines, found, sizes = logging.handlers.BufferingHandler(99), [], []
    logger = logging.getLogger("gradwire")
    logger.addHandler(lines)
    model, handle = wrapped(spec, ours, undo)
    for step, factor in enumerate(FACTORS):
        before = residuals(handle)
        averages = average(model, [factor * gradient for gradient in gradients(rank, step, SHAPES)])
        sizes.append(max(each.abs().max().item() for each in averages.values()))
        if factor == 1e6:
            handle.discard_step()
        if factor != 1.0:
            handle.averager.memory.commit()
            after = residuals(handle)
            found.append(
                "as before"
                if all(map(torch.equal, before, after))
                else "zero"
                if not any(each.any() for each in after)
                else "other"
            )
    logger.removeHandler(lines)
    handle.close()
    return found, [each.getMessage() for each in lines.buffer], sizes


def ordinary(sizes):
    """Return True if no average of an ordinary step has anything of the discarded ones."""
    return all(size < 100 for size, factor in zip(sizes, FACTORS, strict=True) if factor == 1.0)


@pytest.mark.parametrize(("spec", "ours"), [("topk:ratio=0.1", True), ("int4", False), ("powersgd:rank=1", True)])
def test_each_discarded_step_drops_residuals_and_nothing_of_it_comes_back(ranks, spec, ours):
    for found, lines, sizes in ranks.run(discarded_without_a_copy, 2, spec, ours, False):
        assert found == ["zero"] * 3
        assert len([line for line in lines if "undo=True" in line and "MB on this rank" in line]) == 1
        assert ordinary(sizes)


def saved_before_an_overflow(rank, world_size, ours, undo):
    """Averages, and saves, of trainings in which rank 0 alone saves before a step that does not count, or nobody does."""
    found = []
    for saves in (False, True):
        model, handle = wrapped("topk:ratio=0.1", ours, undo)
        averages = []
        for step, factor in enumerate([1.0, 1.0, float("inf"), 1.0, 1.0]):
            if saves and rank == 0 and step == 2:
                handle.state_dict()
            averages.append(average(model, [factor * each for each in gradients(rank, step, SHAPES)]))
            if step == 2:
                after = handle.state_dict()["parameters"]
        handle.close()
        found.append((averages[3:], after))
    return same(*found)


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("ours", [True, False])
def test_a_rank_that_saves_before_a_step_that_does_not_count_trains_and_saves_as_without(ranks, ours, undo):
    assert ranks.run(saved_before_an_overflow, 2, ours, undo) == [True, True]


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
