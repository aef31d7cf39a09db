"""What a swap or new buckets owe to 16-bit gradients: what rounding loses of the sum stays held back."""

import pytest
import torch

import gradwire
from gradwire.compress import Layout, Ranks
from gradwire.compress.simulate import simulate
from gradwire.ddp_core.memory.bucket_memory import BucketMemory

CPU, RANKS = torch.device("cpu"), 4
NAMES, SHAPES = ("w", "b", "k"), ((24, 9), (9,), (4, 3, 2, 2))
SPECS = [
    "int8:block=8,error_feedback=1",
    "int4:block=8,error_feedback=1,start_iter=3",
    "topk:ratio=0.1",
    "onebit:block=8,error_feedback=1",
    "powersgd:rank=1,min_compression_rate=0",
    "dgc:ratio=0.1,momentum=0",
    "int8:block=8,error_feedback=1",
    "hosts:ranks=2+int8:block=8,error_feedback=1",
    "hosts:ranks=2+powersgd:rank=1,min_compression_rate=0",
]
EXACT = 1e-6  # of the largest number; a rounding to 16 bits would be 200 to 3000 times as much


def memories(spec, dtype, step, partial=False):
    on_host = 2 if "hosts" in spec else 1
    layouts = [Layout(NAMES, SHAPES, dtype, CPU, Ranks(RANKS, rank, on_host)) for rank in range(RANKS)]
    options = {"partial": partial, "any_rank_owes": True}
    return [BucketMemory(gradwire.compressor(spec), each, step, **options) for each in layouts]


def held(found):
    """The mean over ranks of what they hold back, in float64."""
    flats = [torch.cat([memory.held_back()[name].double() for name in NAMES]) for memory in found]
    return sum(flats) / RANKS


def stepped(found, step, dtype, used=NAMES):
    """(mean of the gradients of a step, their average)."""
    given = []
    for memory in found:
        source = torch.Generator().manual_seed(10 * step + memory.layout.ranks.rank)
        flat = torch.randn(memory.layout.numel, generator=source).to(dtype)
        for name, view in memory.layout.views(flat).items():
            view.mul_(name in used)
        given.append(flat)
    mean = sum(each.double() for each in given) / RANKS
    programs = [memory.reduce(flat, step, True) for memory, flat in zip(found, given, strict=True)]
    averages = simulate(programs, found[0].layout.ranks.per_host)
    for memory in found:
        memory.end_step(keep=True, any_rank_owes=True)
    assert all(torch.equal(each, averages[0]) for each in averages)
    return mean, averages[0].double()


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_nothing_is_lost_when_another_compressor_takes_over(spec, dtype, partial):
    found = memories("topk:ratio=0.05", dtype, 0)
    for step in range(2):
        stepped(found, step, dtype)
    fresh = memories(spec, dtype, 2, partial)
    for old, new in zip(found, fresh, strict=True):
        new.carry_over(old.held_back())
    for step, used in enumerate((NAMES, NAMES[:2], NAMES) if partial else (NAMES, NAMES), 2):
        before = held(fresh)
        mean, average = stepped(fresh, step, dtype, used)
        off = mean + before - average - held(fresh)
        assert off.abs().max() <= EXACT * (mean + before).abs().max(), step
