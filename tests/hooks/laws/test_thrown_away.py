"""Averages that are cleared with no optimizer step: a handle says so once, under every wrapper, and of no other step."""

import warnings

import pytest
import torch

from ...torch_versions import fsdp_of_others
from ..fsdp.given import GivenParts, gradients
from .wrappers import WHOLE, WRAPPERS, compressed_hybrid, over

STEPS = 4
UNDONE = ("attach", "FSDP2")  # whose steps can be undone here


def warned(made, spec, train, **options):
    """How many warnings a training brings."""
    model, handle = made(GivenParts(), spec, options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, handle)
    handle.close()
    return sum("were averaged and then cleared" in str(each.message) for each in caught)


def backward(model, step, factor=1.0):
    given = gradients(torch.distributed.get_rank(), step)
    model([[factor * each for each in part] for part in given]).backward()


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


def ended(wrapper, end, spec, stepped):
    """How many warnings some steps bring; an optimizer of torch steps in that of `stepped`, beside the end."""

    def train(model, handle):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            backward(model, step)
            if step == stepped:
                optimizer.step()
            ENDS[end][0](model, handle)

    return warned(WRAPPERS[wrapper].made, spec, train, undo=wrapper in UNDONE)


def at_each_end(rank, world_size, wrapper):
    """{(end, when an optimizer steps): the number of warnings} with residuals, and that of warnings without any.

    And with no optimizer of torch, where a step that changes nothing cannot be known.
    """
    spec = WRAPPERS[wrapper].specs[-1]
    cases = [(end, at) for end, (_, noticed) in ENDS.items() for at in ((0, STEPS - 1) if noticed else (0,))]
    found = {(end, at): ended(wrapper, end, spec, at) for end, at in cases}
    return found, ended(wrapper, "cleared", "int8", 0), ended(wrapper, "cleared", spec, None)


@over()
def test_gradients_that_are_cleared_with_no_optimizer_step_are_noticed_once(ranks, wrapper):
    for found, without, unknown in ranks.run(at_each_end, WRAPPERS[wrapper].world_size, wrapper, timeout=120):
        assert found == {(end, at): int(ENDS[end][1]) for end, at in found}
        assert without == (wrapper == "HSDP")  # whose shards hold back in any case
        assert unknown == 0


def after_swap(rank, world_size, first, second, at):
    """How many warnings hybrid sharding brings whose `reduce` is swapped before a step. Its replicas hold back, too."""

    def train(model, handle):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2 * STEPS):
            if step == at:
                handle.swap(reduce=second)
            backward(model, step)
            if step % STEPS == 0:
                optimizer.step()
            model.zero_grad()

    return warned(lambda *given: compressed_hybrid(*given[:2], {"reduce": first}), "topk:ratio=0.1", train)


@fsdp_of_others
@pytest.mark.parametrize("at", [0, 1, STEPS])
@pytest.mark.parametrize(("first", "second"), [("int4", "none"), ("none", "int4")])
def test_who_notices_them_follows_a_swap(ranks, first, second, at):
    assert ranks.run(after_swap, 4, first, second, at, timeout=120) == [1] * 4


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


def unchanged(rank, world_size, wrapper):
    """{case: how many warnings come of steps that change nothing}; and where a class calls no hooks any more.

    torch.compile of torch 2.8 leaves such a class.
    """
    found = {}
    for case, (factor, optimizers_of) in {**UNCHANGED, "no hooks": UNCHANGED["a learning rate of 0"]}.items():

        def train(model, handle, case=case, factor=factor, optimizers_of=optimizers_of):
            optimizers = optimizers_of(model)
            kind = type(optimizers[0])
            hooked = kind.step
            try:
                for step in range(STEPS):
                    backward(model, step, factor)
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                    if case == "no hooks" and step == 2:
                        kind.step = hooked.__wrapped__
            finally:
                kind.step = hooked

        found[case] = warned(WRAPPERS[wrapper].made, WRAPPERS[wrapper].specs[-1], train)
    return found


@over(*WHOLE)
def test_a_step_that_changes_no_number_or_calls_no_hooks_is_a_step(ranks, wrapper):
    for found in ranks.run(unchanged, 2, wrapper):
        assert found == dict.fromkeys(found, 0)


def discriminated(rank, world_size):
    """How many warnings come where another optimizer steps after a backward whose gradients are cleared."""

    def train(model, handle):
        mine, other = fused(model), torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
        for step in range(STEPS):
            for optimizer in (mine, other):
                backward(model, step)
                optimizer.step()
                model.zero_grad()

    return warned(WRAPPERS["own"].made, "topk:ratio=0.1", train)


def test_the_step_of_another_model_s_optimizer_is_none_of_this_one(ranks):
    assert ranks.run(discriminated, 2) == [1] * 2
