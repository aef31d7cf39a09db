"""Steps that do not count, under every wrapper: with `undo=True` they leave no trace, and without it nothing of theirs."""

import pytest
import torch

from ...ddp_core.errors import logged
from ..given import same
from .wrappers import EVERY, WHOLE, WRAPPERS, Training, few, gradients, held, over

STEPS, BEFORE = 4, (1, 3)  # steps, and those before which one does not count


def nothing(training):
    """All steps count."""


def discarded(training):
    training.step(50)
    training.handle.discard_step()


def kept(training):
    training.step(50)


def overflowing(training):
    """One number of one rank is not finite."""
    given = gradients(training.rank, 50)
    if training.rank == 1:
        given[0][0][3, 4] = torch.inf
    averages = training.average(given)
    assert not averages["parts.0.p0"].isfinite().all()


def around_a_swap(training):
    """An overflow right before a swap and right after it, of which no step lies between."""
    overflowing(training)
    training.swap("none")
    overflowing(training)
    training.swap(training.spec)


def swapped(training):
    """The same without."""
    training.swap("none")
    training.swap(training.spec)


def trained(wrapper, spec, act, saving=()):
    """Averages, and the state; some ranks save before what does not count."""
    training, averages = Training(wrapper, spec, undo=True), []
    for number in range(STEPS):
        if number in BEFORE:
            if training.rank in saving:
                training.handle.state_dict()
            act(training)
        averages.append(training.step(number))
    state = training.handle.state_dict()
    training.close()
    return averages, held(state)


PAIRS = {nothing: (discarded, overflowing, kept), swapped: (around_a_swap,)}


def both(rank, world_size, wrapper):
    """{case: whether training goes on as without the steps}; the last ones count, and show that the test sees them."""
    found = {}
    for spec in few(wrapper) if wrapper != "replicate" else ["topk:ratio=0.1"]:  # a warm-up counts all steps
        for without, acts in PAIRS.items():
            expected = trained(wrapper, spec, without)
            for act in acts:
                found[spec, act.__name__] = same(trained(wrapper, spec, act, saving=[0]), expected)
    return found


@over(*WRAPPERS, "FSDP2 of replicas", "HSDP, exact shards")
def test_a_step_that_does_not_count_changes_no_bit_whoever_saves(ranks, wrapper):
    for found in ranks.run(both, EVERY[wrapper].world_size, wrapper, timeout=120):
        assert found == {(spec, act): act != "kept" for spec, act in found}


FACTORS = [1.0, 1.0, 1e6, 1.0, 1e6, 1.0, float("inf"), 1.0]  # of gradients; large ones are discarded


def without_a_copy(rank, world_size, wrapper, saving):
    """The averages of ordinary steps, residuals after each that does not count, and what is logged."""
    averages, left = [], []
    with logged("undo=True") as lines:
        training = Training(wrapper, "int4" if wrapper == "FSDP2" else "topk:ratio=0.1")
        for number, factor in enumerate(FACTORS):
            if factor != 1.0 and rank in saving:
                training.handle.state_dict()
            found = training.step(number, factor)
            averages += [found] if factor == 1.0 else []
            if factor == 1e6:
                training.handle.discard_step()
            if factor != 1.0:
                left += [each for fields in held(training.handle.state_dict()).values() for each in fields.values()]
    training.close()
    return averages, any(each.any() for each in left), lines


@over()
def test_without_a_copy_each_drops_residuals_and_nothing_of_it_comes_back_whoever_saves(ranks, wrapper):
    quiet, saving = (ranks.run(without_a_copy, WRAPPERS[wrapper].world_size, wrapper, who) for who in ((), (0,)))
    for (averages, left, told), (others, *_) in zip(quiet, saving, strict=True):
        assert max(each.abs().max() for step in averages for each in step.values()) < 100
        assert not left
        assert [line for line in told if "MB on this rank" in line] == told
        assert len(told) == (1 if wrapper in WHOLE else len(told))
        assert same(averages, others)


def refused(rank, world_size, wrapper):
    """What discarding raises with no step, and after what settles one."""
    training, messages = Training(wrapper), []
    for settle in (lambda: None, lambda: training.handle.rescale(2.0), lambda: training.swap("int8")):
        if messages:
            training.step(len(messages))
        settle()
        with pytest.raises(RuntimeError) as caught:
            training.handle.discard_step()
        messages.append(str(caught.value))
    training.close()
    return messages


@over(*WHOLE, "FSDP2")
def test_a_step_that_is_settled_cannot_be_discarded(ranks, wrapper):
    for messages in ranks.run(refused, 2, wrapper):
        assert all(message.startswith("there is no step to discard") for message in messages)
