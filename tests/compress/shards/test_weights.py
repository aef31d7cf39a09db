"""Gathered weights of all ranks against the exact ones, where a rank's row ends within a block."""

import pytest
import torch

from gradwire.compress.shards.layout import ShardLayout
from gradwire.compress.shards.weights import HeldWeights, OwnRows, WeightKind, weight_gather
from gradwire.compress.simulate import simulate

from ..given import layout, placed

RANKS = 3


def layout_of(rank, row):
    return ShardLayout(placed(layout((RANKS * row,), world_size=RANKS), rank=rank), (0,))


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
