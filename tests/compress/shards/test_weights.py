"""Gathered weights of all ranks against the exact ones, where a rank's row ends within a block."""

import pytest
import torch

from gradwire.compress import Layout, Ranks
from gradwire.compress.shards.layout import ShardLayout
from gradwire.compress.shards.weights import HeldWeights, OwnRows, WeightKind, weight_gather
from gradwire.compress.simulate import simulate

RANKS = 3


def layout_of(rank, row):
    whole = Layout(("weight",), ((RANKS * row,),), torch.float32, torch.device("cpu"), Ranks(RANKS, rank))
    return ShardLayout(whole, (0,))


def off(spec, row, gathers):
    """How far weights in use are from the exact ones, relative to these, after each gather of the same weights."""
    generator = torch.Generator().manual_seed(row)
    first, rows = torch.zeros(RANKS, row), torch.randn(RANKS, row, generator=generator)
    weights = weight_gather(spec)
    held = [HeldWeights(OwnRows.empty(layout_of(rank, row))) if weights.differences else None for rank in range(RANKS)]
    kinds = [WeightKind(torch.float32, layout_of(rank, row)) for rank in range(RANKS)]
    found = []
    for number in range(gathers + 1):
        exact = rows + 1e-6 * number if number else first  # a row that has not changed sends nothing
        programs = [
            weights.gather(exact[rank].clone(), torch.empty(RANKS * row), kinds[rank], held[rank])
            for rank in range(RANKS)
        ]
        answers = simulate(programs)
        assert all(torch.equal(each, answers[0]) for each in answers)
        found.append(float((answers[0].view(RANKS, row) - exact).norm() / rows.norm()))
    return found[1:]


@pytest.mark.parametrize("row", [8, 55, 145, 1024, 1100])
@pytest.mark.parametrize("spec", ["int8", "int8:rotate=true", "int2:send=weights", "onebit:send=weights"])
def test_weights_are_gathered_as_exactly_as_a_codec_can(spec, row):
    assert off(spec, row, 1)[0] < {"int8": 0.02, "int2": 0.6, "onebit": 0.75}[spec.partition(":")[0]]


@pytest.mark.parametrize("row", [55, 145, 1024, 1100])
@pytest.mark.parametrize("spec", ["int4", "int4:rotate=true", "int2", "onebit", "onebit:rotate=false", "ternary"])
def test_differences_bring_weights_in_use_to_the_exact_ones(spec, row):
    found = off(spec, row, 8)
    assert found[7] < 0.5 * found[0]
    assert found[7] < 0.25


class Gathers:
    """Gathers of all ranks, in one process; `bits`: what the last one had travel for an element of a rank's row."""

    def __init__(self, spec, row):
        self.weights, self.row = weight_gather(spec), row
        self.held = [HeldWeights(OwnRows.empty(layout_of(rank, row))) for rank in range(RANKS)]
        self.kinds = [WeightKind(torch.float32, layout_of(rank, row)) for rank in range(RANKS)]

    def off(self, exact, *, steps):
        """How far the weights in use are from exact ones, (ranks, row), relative to these."""
        programs = [
            counted(self.weights.gather(*within(mine, rank), self.kinds[rank], self.held[rank], steps=steps))
            for rank, mine in enumerate(exact)
        ]
        answers = simulate(programs)
        assert all(torch.equal(each, answers[0][0]) for each, _ in answers)
        self.bits = 8 * answers[0][1] / self.row
        return float((answers[0][0].view(RANKS, self.row) - exact).norm() / exact.norm())


def within(mine, rank):
    """A rank's row as torch gives it, a part of the output, and the output."""
    rows = torch.zeros(RANKS, len(mine))
    return rows[rank].copy_(mine), rows.view(-1)


def counted(program):
    """A program, and how many bytes a rank gives it to send."""
    reply, sent = None, 0
    while True:
        try:
            request = program.send(reply)
        except StopIteration as end:
            return end.value, sent
        sent += request.tensor.nbytes
        reply = yield request


def walk(row, steps):
    """Weights after each of some small steps."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(RANKS, row, generator=generator)
    changes = 1e-3 * torch.randn(steps, RANKS, row, generator=generator)
    return [first, *(first + changes[: step + 1].sum(0) for step in range(steps))]


@pytest.mark.parametrize("spec", ["int4", "int2", "onebit", "int8:send=differences"])
def test_outside_of_training_weights_that_no_step_made_are_exact(spec):
    gathers, others = Gathers(spec, 1024), torch.randn(RANKS, 1024, generator=torch.Generator().manual_seed(1))
    for step, exact in enumerate(walk(1024, 10)):
        gathers.off(exact, steps=True)
        few = gathers.bits
        if step in (4, 7, 9):
            swapped = exact.clone()
            swapped[1] = others[1]  # of one rank alone
            assert gathers.off(swapped, steps=False) == 0
            assert gathers.bits > 32
            assert gathers.off(swapped, steps=False) == 0
            assert gathers.bits < 10
        assert few < 10 or step == 0


@pytest.mark.parametrize("spec", ["int4", "int2", "onebit", "int8:send=differences"])
def test_an_evaluation_after_a_step_or_a_swap_in_training_sends_differences(spec):
    gathers, exact = Gathers(spec, 1024), walk(1024, 5)
    others = torch.randn(RANKS, 1024, generator=torch.Generator().manual_seed(1))
    gathers.off(exact[0], steps=True)
    for now in exact[1:]:
        gathers.off(now, steps=True)
        assert 0 < gathers.off(now + 1e-3, steps=False) < 2e-3
        assert gathers.bits < 10
    assert gathers.off(others, steps=True) > 1e-4
    assert gathers.bits < 10


@pytest.mark.parametrize("first", [0.0, 1.0])
def test_a_model_that_is_loaded_before_the_first_step_is_evaluated_as_it_is(first):
    gathers, (others, *_) = Gathers("int4", 1024), walk(1024, 0)
    gathers.off(torch.full((RANKS, 1024), first) + 1e-9 * others, steps=True)
    assert gathers.off(others, steps=False) == 0
