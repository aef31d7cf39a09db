"""P and Q in alternate steps, against the algorithm in numpy."""

import math

import numpy
import pytest
import torch

from gradwire.compress import ACPPowerSGD, Simulation, compressor, dry_run
from gradwire.compress.state import tree as states

from ..given import gradients, layout

EVERY = "min_compression_rate=0"
SHAPE, ROWS, COLUMNS = (24, 3, 4), 24, 12


def orthonormal(factor):
    return numpy.linalg.qr(factor).Q


@pytest.mark.parametrize("first_step", [0, 1])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_step_projects_onto_the_other_factor_and_each_rank_keeps_what_its_own_matrix_lacks(
    world_size, first_step
):
    within = layout(SHAPE, dtype=torch.float64, names=["conv"], world_size=world_size)
    simulation = Simulation(compressor(f"acp-powersgd:rank=3,{EVERY}"), within)
    for state in simulation.states:
        states.set_step(state, first_step)
    begun = ACPPowerSGD(rank=3, min_compression_rate=0).init(within)
    p, q = (leaf.flat.numpy().reshape(3, -1).T for leaf in (begun.p, begun.q))
    held = numpy.zeros((world_size, ROWS, COLUMNS))
    for step in range(first_step, first_step + 5):
        given = gradients(within, step)
        matrices = numpy.stack([g.numpy().reshape(ROWS, COLUMNS) for g in given]) + held
        if step % 2:
            basis = orthonormal(p)
            sent = [basis @ (basis.T @ m) for m in matrices]
            q = numpy.mean([m.T @ basis for m in matrices], axis=0)
        else:
            basis = orthonormal(q)
            sent = [m @ basis @ basis.T for m in matrices]
            p = numpy.mean([m @ basis for m in matrices], axis=0)
        held = matrices - sent
        for output in simulation.step(given):
            assert numpy.allclose(output.numpy().reshape(ROWS, COLUMNS), numpy.mean(sent, axis=0), atol=1e-11)
        found = [state.residual.flat.numpy().reshape(ROWS, COLUMNS) for state in simulation.states]
        assert numpy.allclose(found, held, atol=1e-11)


@pytest.mark.parametrize("rank", [1, 4])
def test_a_step_sends_one_factor_and_what_is_not_compressed_and_with_q_a_bit_for_each_row(rank):
    within = layout((64, 32), (7,), world_size=8)
    built = compressor(f"acp-powersgd:rank={rank}")
    for step, (side, bits) in enumerate([(64, 0), (32, 16), (64, 0)]):
        found = dry_run(built, within, step)
        assert (found.rounds, found.payload_bytes) == (1 + bool(bits), 4 * (rank * side + 7) + bits)


def test_factors_depend_on_name_and_seed_alone_and_are_standard_normal():
    def factors(*shapes, names, **options):
        state = ACPPowerSGD(min_compression_rate=0, **options).init(layout(*shapes, names=names))
        return [leaf.layout.views(leaf.flat)["a"] for leaf in (state.p, state.q)]

    alone = factors((16, 12), names=["a"])
    assert all(map(torch.equal, factors((9,), (30, 40), (16, 12), names=["x", "b", "a"]), alone))
    assert not any(map(torch.equal, factors((16, 12), names=["a"], seed=1), alone))
    p, q = factors((1000, 1000), names=["a"], rank=8)
    assert not torch.equal(p, q)
    assert max(abs(p.mean().item()), abs(q.mean().item()), abs(p.std().item() - 1), abs(q.std().item() - 1)) < 0.05


@pytest.mark.parametrize("steps", [1, 2])
def test_after_zero_gradients_it_still_finds_one_whose_first_rows_and_columns_are_zero(steps):
    within = layout((64, 48))
    simulation = Simulation(compressor("acp-powersgd:rank=4"), within)
    gradient = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    gradient[:8] = gradient[:, :8] = 0
    for _ in range(steps):
        assert simulation.step([torch.zeros(within.numel)] * 2)[0].count_nonzero() == 0
    total = sum(simulation.step([gradient.flatten()] * 2)[0] for _ in range(200)) / 200
    assert (total - gradient.flatten()).norm() < 0.2 * gradient.norm()


def test_matrices_are_those_of_powersgd():
    shapes = [(64, 32), (7,), (16, 3, 3, 3), (100, 1), (8, 9), (0, 5)]
    within = layout(*shapes)
    ours, theirs = (compressor(f"{name}:rank=2").init(within).inner for name in ("acp-powersgd", "powersgd"))
    assert (ours.factors.matrices, ours.whole) == (theirs.factors.matrices, theirs.whole)
    assert [m.rows * m.columns for m in ours.factors.matrices] == [math.prod(shapes[i]) for i in (0, 2, 4)]
