"""Chunks of largest norm: chosen by all ranks together, against numpy."""

import math

import numpy
import pytest
import torch

from gradwire.compress import Simulation, compressor, dry_run

from ..given import gradients, layout

CHUNK = 16
SPEC = f"chunktopk:ratio=0.1,chunk={CHUNK}"
SHAPES = ((24, 31), (5,))  # 749 elements: 46 chunks and 13 elements behind them
CHUNKS, BEHIND, SENT = 46, 13, 5


def largest(values, chunk=CHUNK, count=SENT):
    """Which elements are sent: the chunks of largest root mean square, in the mean over ranks, and those behind."""
    whole = values[0].size // chunk * chunk
    squares = [numpy.square(v[:whole]).reshape(-1, chunk).mean(axis=1) for v in values]
    norms = numpy.mean(numpy.sqrt(squares), axis=0)
    sent = numpy.arange(values[0].size) >= whole
    for index in numpy.argsort(-norms, kind="stable")[:count]:
        sent[index * chunk : (index + 1) * chunk] = True
    return sent


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_step_averages_the_largest_chunks_of_gradient_and_residual(world_size, feedback):
    within = layout(*SHAPES, dtype=torch.float64, world_size=world_size)
    simulation = Simulation(compressor(f"{SPEC},error_feedback={int(feedback)}"), within)
    held = [numpy.zeros(within.numel) for _ in range(world_size)]
    for step in range(5):
        given = gradients(within, step)
        values = [g.numpy() + h for g, h in zip(given, held, strict=True)]
        sent = largest(values)
        held = [numpy.where(sent, 0, v) * feedback for v in values]
        for output in simulation.step(given):
            assert numpy.allclose(output.numpy(), numpy.where(sent, numpy.mean(values, axis=0), 0), atol=1e-14)
        if feedback:
            assert numpy.allclose([state.residual.flat.numpy() for state in simulation.states], held, atol=1e-14)


def test_of_equal_norms_the_lower_chunks_are_sent():
    within = layout((10 * CHUNK,))
    output = Simulation(compressor(f"chunktopk:ratio=0.3,chunk={CHUNK}"), within).step([torch.ones(10 * CHUNK)] * 2)[0]
    assert output.tolist() == [1.0] * 3 * CHUNK + [0.0] * 7 * CHUNK


def test_a_chunk_that_is_large_on_one_rank_is_sent_by_all():
    within = layout((4 * CHUNK,), world_size=2)
    given = [torch.ones(4 * CHUNK), torch.ones(4 * CHUNK)]
    given[1][2 * CHUNK] = 100.0
    output = Simulation(compressor(f"chunktopk:chunk={CHUNK}"), within).step(given)[0]
    assert output.view(4, CHUNK).any(dim=1).tolist() == [False, False, True, False]
    assert output[2 * CHUNK :][:2].tolist() == [50.5, 1.0]


@pytest.mark.parametrize("world_size", [1, 2, 8, 64])
def test_the_payloads_are_norms_then_chunks_and_do_not_grow_with_the_ranks(world_size):
    found = dry_run(compressor(SPEC), layout(*SHAPES, world_size=world_size))
    assert (found.rounds, found.payload_bytes) == (2, 4 * CHUNKS + 4 * (SENT * CHUNK + BEHIND))


@pytest.mark.parametrize("shape", [(3,), (CHUNK,), (CHUNK + 3,), (2 * CHUNK,)], ids=str)
def test_where_all_chunks_are_sent_nobody_asks_for_norms(shape):
    within = layout(shape)
    given = gradients(within)
    spec = f"chunktopk:ratio=1,chunk={CHUNK}"
    assert dry_run(compressor(spec), within).rounds == 1
    assert torch.equal(Simulation(compressor(spec), within).step(given)[0], (given[0] / 2).add_(given[1] / 2))


def test_an_empty_bucket_sends_nothing():
    assert dry_run(compressor("chunktopk"), layout((0,))).rounds == 0


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [0, 100, 300, 748])
@pytest.mark.parametrize("wrapper", ["", "fp16+", "bf16+"])
def test_a_gradient_that_is_not_finite_on_one_rank_is_chosen_and_seen_on_all(bad, place, wrapper):
    within = layout(*SHAPES)
    given = [gradient * 1e4 for gradient in gradients(within)]
    given[1][place] = bad
    for output in Simulation(compressor(wrapper + SPEC), within).step(given):
        assert not output.isfinite().all()


@pytest.mark.parametrize("scale", [1e-15, 1e3, 1e15])
def test_the_choice_does_not_depend_on_the_scale(scale):
    within = layout(*SHAPES)
    given = gradients(within)
    plain, scaled = (
        Simulation(compressor(SPEC), within).step([gradient * factor for gradient in given])[0]
        for factor in (1.0, scale)
    )
    assert torch.equal(plain != 0, scaled != 0)


def test_norms_in_float16_hold_what_sums_of_magnitudes_would_not():
    within = layout((40 * 512,), world_size=2)
    given = torch.ones(within.numel).mul_(1e4)
    given[7 * 512 : 8 * 512] *= 2
    output = Simulation(compressor("fp16+chunktopk"), within).step([given, given])[0]
    assert output.view(40, 512).any(dim=1).nonzero().flatten().tolist() == [7]
    assert math.isclose(output.max().item(), 2e4, rel_tol=1e-3)
