"""What is held back when `none` takes over comes out, and with it ends what steps do for that; on all ranks alike."""

import copy

import pytest
import torch

import gradwire
from gradwire.compress import Layout, Ranks
from gradwire.ddp_core.memory.model_memory import ModelMemory

from ...hooks import given
from ..layers import DYNAMIC, LAYER, Layers, expected_average, gradients_of, inputs_of
from ..nets import same
from ..wrapping import wrapped

ALL = (0, 1, 2, 3)
DENSE = 4 * LAYER  # bytes of all gradients
USAGE = 4 * 8  # bytes of a number for each parameter


def backward(model, rank, step, used, factor=1.0):
    model.zero_grad()
    (model(inputs_of(rank, step), used).square().sum() * factor).backward()


def swapped(rank, spec, **options):
    """A model of ours after two steps with a compressor, and a swap to `none`."""
    model = gradwire.DistributedDataParallel(Layers(), compressor=spec, **{**DYNAMIC, **options})
    for step in range(2):
        backward(model, rank, step, ALL)
    model.compression.swap("none")
    return model


def loaded_then_swapped(rank, world_size, specs):
    """What a matrix lacks in the end where only one rank of each host has saved what is held back of it."""
    shapes, due = [(8, 8)], torch.zeros(8, 8, dtype=torch.float64)

    def made():
        return gradwire.DistributedDataParallel(
            given.Given(shapes), compressor="hosts:ranks=2+powersgd:rank=1", find_unused_parameters=True
        )

    def step(model, number):
        (average,) = given.average(model, given.gradients(rank, number, shapes)).values()
        everyone_s = [given.gradients(each, number, shapes)[0].double() for each in range(world_size)]
        due.add_(sum(everyone_s) / world_size - average)

    model = made()
    for number in range(2):
        step(model, number)
    saved, again = model.compression.state_dict(), made()
    again.compression.load_state_dict(saved)
    for spec in specs:
        again.compression.swap(spec)
    step(again, 2)
    again.compression.swap("none")
    step(again, 3)
    return float(due.abs().max())


@pytest.mark.parametrize("specs", [["none"], ["topk:ratio=0.1", "none"]], ids=" ".join)
def test_ranks_of_a_host_that_have_saved_nothing_swap_like_the_others(ranks, specs):
    assert max(ranks.run(loaded_then_swapped, 4, specs)) < 1e-5


def wishes_of(model):
    """Of the next step: the scale of gradients on their way into buckets, and whether ranks ask for usage before."""
    return model.reducer.averager.scale, model.reducer.averager.zero_unused_gradients


def payloads_after_swap(rank, world_size, ours):
    """Bytes of each step after a swap, twice."""
    (model, handle), payloads = wrapped(ours, Layers(), "topk", **DYNAMIC), []
    for spec in ("topk", "none", "topk", "none"):
        handle.swap(spec)
        for step, used in enumerate([(0, 1, 2), ALL, ALL]):
            backward(model, rank, step, used)
            payloads.append(handle.stats().last.traffic.payload_bytes)
    handle.close()
    return payloads[3:6], payloads[9:]


@pytest.mark.parametrize("ours", [True, False])
def test_usage_travels_with_buckets_until_all_has_come_out_after_each_swap(ranks, ours):
    for payloads in ranks.run(payloads_after_swap, 2, ours):
        assert payloads == ([DENSE + USAGE, DENSE + USAGE, DENSE],) * 2


def overflow_after_swap(rank, world_size):
    """The wishes, and what came out, of steps after a swap of which the first overflows on one rank, or that is left out."""
    results = []
    for first in (2, 3):
        model, wishes, gradients = swapped(rank, "topk:ratio=0.1"), [], []
        for step in range(first, 6):
            wishes.append(wishes_of(model))
            backward(model, rank, step, ALL, float("inf") if step == 2 and rank else 1.0)
            gradients += gradients_of(model) if step > 2 else []
        results.append((wishes, gradients))
    return results


def test_a_step_that_overflows_brings_nothing_out(ranks):
    for (wishes, gradients), (_, expected) in ranks.run(overflow_after_swap, 2):
        assert wishes == [(1.0, True), (1.0, True), (0.5, False), (0.5, False)]
        assert same(gradients, expected)


def one_rank_saves(rank, world_size, dynamic):
    """The gradients of each step after a swap, where the first rank alone saves after each."""
    model, history = swapped(rank, "topk:ratio=0.1", find_unused_parameters=dynamic), []
    for step in range(2, 6):
        backward(model, rank, step, ALL)
        history.append(gradients_of(model))
        if rank == 0:
            model.compression.state_dict()
    return history


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_rank_that_saves_alone_goes_on_like_the_others(ranks, dynamic):
    answers = ranks.run(one_rank_saves, 2, dynamic)
    for history in answers:
        for step, (gradients, others) in enumerate(zip(history, answers[0], strict=True), 2):
            assert same(gradients, others)
            if step > 2:
                torch.testing.assert_close(gradients, expected_average([ALL] * 2, step))


STATIC = {"find_unused_parameters": False}
SKIPPING = {"skip_all_reduce_unused_params": True}


def resumed(rank, world_size, options):
    """Steps after a swap, with a stop after each one, and without; the wishes and gradients of each step."""
    usage, runs = [ALL] * 3 if options == STATIC else [(0, 1, 2), (0, 1), (3,), ALL, ALL], []
    for stop in range(1, len(usage) + 1):
        model, history = swapped(rank, "topk:ratio=0.1", **options), []
        for step, used in enumerate(usage, 1):
            wishes = wishes_of(model)
            backward(model, rank, step, used)
            history.append((wishes, gradients_of(model)))
            if step == stop:
                saved = copy.deepcopy(model.compression.state_dict())
                model = gradwire.DistributedDataParallel(Layers(), **{**DYNAMIC, **options})
                model.compression.load_state_dict(saved)
        runs.append(history)
    return runs


@pytest.mark.parametrize("options", [STATIC, SKIPPING])
def test_a_state_saved_while_something_is_owed_goes_on_in_the_same_bits(ranks, options):
    for *stopped, whole in ranks.run(resumed, 2, options):
        assert len({wishes for wishes, _ in whole}) == 2
        for history in stopped:
            for (wishes, gradients), (expected_wishes, expected) in zip(history, whole, strict=True):
                assert wishes == expected_wishes
                assert same(gradients, expected)


def states_of_a_layer_that_went_unused(rank, world_size):
    """What is held back by name: before, after `rescale(2)`, and after a swap, where new buckets never met a parameter."""
    model = gradwire.DistributedDataParallel(Layers(), compressor="topk:ratio=0.1", **DYNAMIC, **SKIPPING)
    for step in range(3):
        backward(model, rank, step, ALL if step == 0 else (0, 1, 2))
    handle, states = model.compression, []
    for change in (lambda: None, lambda: handle.rescale(2.0), lambda: handle.swap("bf16")):
        change()
        states.append({name: sum(fields.values()) for name, fields in handle.state_dict()["parameters"].items()})
    return [{name: numbers.reshape(-1) for name, numbers in state.items()} for state in states]


def test_what_is_held_back_of_a_parameter_that_no_bucket_has_met_is_saved_rescaled_and_owed(ranks):
    for before, rescaled, swapped in ranks.run(states_of_a_layer_that_went_unused, 2):
        assert before["layers.3.weight"].any()
        torch.testing.assert_close(rescaled, {name: 2 * numbers for name, numbers in before.items()})
        torch.testing.assert_close(swapped, rescaled)


def test_a_parameter_that_owes_zeros_and_lost_its_bucket_is_forgotten_when_residuals_are_rescaled():
    layouts = [
        Layout(names, ((4,),) * len(names), torch.float32, torch.device("cpu"), Ranks(2))
        for names in (("a", "b"), ("a",))
    ]
    memory = ModelMemory(gradwire.compressor("topk:ratio=0.5"))
    memory.add(layouts[0])
    memory.replace(gradwire.compressor("none"))
    for layout in layouts:
        memory.add(layout)
    assert "b" in memory.snapshot().state_dict()["parameters"]
    memory.rescale(0.5)
    memory.replace(gradwire.compressor("bf16"))
    assert "b" not in memory.snapshot().state_dict()["parameters"]
