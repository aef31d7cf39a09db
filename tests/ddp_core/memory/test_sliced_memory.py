"""A bucket that is sent in slices: what is saved of it is of whole parameters, and nothing is lost in other slices."""

import dataclasses

import pytest
import torch

import gradwire
from gradwire.compress import Layout, Ranks
from gradwire.compress.simulate import simulate
from gradwire.ddp_core.memory.bucket_memory import CARRIED_OVER
from gradwire.ddp_core.memory.sliced_memory import SlicedMemory, may_be_cut

CPU = torch.device("cpu")
RANKS = 3
WHOLE = Layout(("a", "b"), ((5, 40), (100,)), torch.float32, CPU, Ranks(RANKS))
SPECS = [
    "int8:block=8,error_feedback=1",
    "int4:block=8",
    "int2:block=8",
    "ternary:block=8",
    "onebit:block=8,error_feedback=1",
    "topk:ratio=0.1",
]
TAKEN_AS_A_ROW = ["none", "bf16", "qsgd", "chunktopk", "topk:ratio=0.1,error_feedback=0.9", "int8:start_iter=3"]
AS_A_WHOLE = ["powersgd:rank=2", "batched-powersgd", "dgc", "adaptive", "hosts:inner=int4"]
AS_A_WHOLE += ["int8:momentum=0.9"]


def cut(layout, size):
    """The layouts of slices of so many elements."""
    found = []
    for start in range(0, layout.numel, size):
        end, entries = min(start + size, layout.numel), []
        for name, offset, numel in zip(layout.names, layout.offsets, layout.sizes, strict=True):
            first, last = max(start, offset), min(end, offset + numel)
            entries += [(name, (last - first,), first - offset)] if first < last else []
        names, shapes, starts = zip(*entries, strict=True)
        found.append(dataclasses.replace(layout, names=names, shapes=shapes, starts=starts))
    return found


def memory_of(spec, rank, size, step=0):
    """Of the bucket in slices of so many elements; None: as it is."""
    built, layout = gradwire.compressor(spec), dataclasses.replace(WHOLE, ranks=Ranks(RANKS, rank))
    return SlicedMemory(built, layout, cut(layout, size) if size else (), step)


def gradients(step):
    return [
        torch.randn(WHOLE.numel, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in range(RANKS)
    ]


def stepped(memories, step, given):
    """The average after a step of all ranks."""
    flats, sizes = [grad.clone() for grad in given], [each.layout.numel for each in memories[0].slices]
    for place, parts in enumerate(zip(*(flat.split(sizes) for flat in flats), strict=True)):
        slices = [memory.slices[place] for memory in memories]
        simulate([each.reduce(part, step, watched=True) for each, part in zip(slices, parts, strict=True)])
    for each in (each for memory in memories for each in memory.slices):
        each.end_step(keep=True, any_rank_owes=False)
    return flats[0]


def after(spec, size, steps):
    memories = [memory_of(spec, rank, size) for rank in range(RANKS)]
    for step in range(steps):
        stepped(memories, step, gradients(step))
    return memories


def held(memories):
    """The sum over ranks of what is held back."""
    return {name: sum(memory.held_back()[name] for memory in memories) for name in WHOLE.names}


@pytest.mark.parametrize("spec", TAKEN_AS_A_ROW + SPECS)
def test_a_method_that_remembers_single_numbers_only_may_be_cut(spec):
    assert may_be_cut(gradwire.compressor(spec))


@pytest.mark.parametrize("spec", AS_A_WHOLE)
def test_factors_momenta_choices_and_shares_are_of_whole_buckets(spec):
    assert not may_be_cut(gradwire.compressor(spec))


@pytest.mark.parametrize(("saved_in", "loaded_in"), [(64, 96), (64, None), (None, 64), (300, 64)])
@pytest.mark.parametrize("spec", SPECS)
def test_in_other_slices_nothing_that_was_held_back_is_lost(spec, saved_in, loaded_in):
    """Averages add up to the gradients, but for what is held back in the end: over a change of slices, too."""
    memories = after(spec, saved_in, 3)
    loaded = [memory_of(spec, rank, loaded_in, step=3) for rank in range(RANKS)]
    for old, new in zip(memories, loaded, strict=True):
        new.load(old.save())
    before, now = held(memories), held(loaded)
    torch.testing.assert_close(now, before)
    average = stepped(loaded, 3, gradients(3))
    later = held(loaded)
    given = WHOLE.views(sum(gradients(3)))
    for name, view in WHOLE.views(average).items():
        left = before[name] + given[name].flatten() - RANKS * view.flatten()
        torch.testing.assert_close(later[name], left, rtol=1e-4, atol=1e-5)


def test_what_is_owed_and_factors_reach_each_number_of_a_parameter():
    memory = memory_of("topk:ratio=0.1", 0, 64)
    owed = torch.arange(200.0)
    memory.carry_over({"a": owed})
    for each in memory.slices:
        each.rescale(2.0)
    assert torch.equal(memory.held_back()["a"], 2 * owed)
    saved = memory.save()
    assert torch.equal(saved["a"][CARRIED_OVER], 2 * owed)
    again = memory_of("topk:ratio=0.1", 0, 96)
    again.load(saved)
    assert torch.equal(again.held_back()["a"], 2 * owed)
    assert not again.held_back()["b"].any()
