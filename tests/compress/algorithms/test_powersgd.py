"""PowerSGD against the paper's algorithm in numpy, and against the best low-rank approximation."""

import math

import numpy
import pytest
import torch

from gradwire.compress import ErrorFeedback, PowerSGD, Simulation, compressor, dry_run, simulate
from gradwire.compress.algorithms.powersgd import BatchedPowerSGD, near_square
from gradwire.kernels import Residual

from ..given import gradients, layout, placed

EVERY = "min_compression_rate=0"


def q_of(within, **options):
    """The initial Q of each parameter, (rank, columns)."""
    state = PowerSGD(**{"min_compression_rate": 0, **options}).init(within)
    return {name: view.clone() for name, view in state.q.layout.views(state.q.flat).items()}


def paper(matrices, q, iterations=1):
    """Algorithm 1 of Vogels et al. 2019 over the ranks' matrices; the average and the next Q."""
    for _ in range(iterations):
        p = numpy.linalg.qr(numpy.mean([m @ q for m in matrices], axis=0)).Q
        q = numpy.mean([m.T @ p for m in matrices], axis=0)
    return p @ q.T, q


def best(matrix, rank):
    """The closest matrix of a rank (Eckart and Young)."""
    u, s, v = numpy.linalg.svd(matrix)
    return (u[:, :rank] * s[:rank]) @ v[:rank]


@pytest.mark.parametrize("iterations", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_step_is_the_paper_s_algorithm_with_error_feedback_and_warm_start(world_size, iterations):
    within = layout((24, 3, 4), dtype=torch.float64, names=["conv"], world_size=world_size)
    simulation = Simulation(compressor(f"powersgd:rank=3,{EVERY},power_iterations={iterations}"), within)
    q = q_of(within, rank=3)["conv"].numpy().T
    residuals = [numpy.zeros((24, 12)) for _ in range(world_size)]
    for step in range(4):
        given = gradients(within, step)
        matrices = [g.numpy().reshape(24, 12) + held for g, held in zip(given, residuals, strict=True)]
        expected, q = paper(matrices, q, iterations)
        residuals = [m - expected for m in matrices]
        outputs = simulation.step(given)
        assert all(numpy.allclose(out.numpy().reshape(24, 12), expected, atol=1e-11) for out in outputs)
        held = [state.residual.flat.numpy().reshape(24, 12) for state in simulation.states]
        assert numpy.allclose(held, residuals, atol=1e-11)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (1, 5), (5, 1), (6, 6), (4, 3, 3)], ids=str)
def test_with_full_rank_the_average_is_exact_and_the_rank_is_capped_at_the_smaller_side(shape):
    within = layout(shape)
    given = gradients(within)
    simulation = Simulation(compressor(f"powersgd:rank=100,{EVERY},error_feedback=false"), within)
    assert torch.allclose(simulation.step(given)[0], sum(given) / 2, atol=1e-5)
    assert simulation.states[0].factors.matrices[0].rank == min(shape[0], math.prod(shape[1:]))


@pytest.mark.parametrize("scale", [2.0**-60, 2.0**60])
def test_a_power_of_two_passes_through_to_the_bit(scale):
    within = layout((30, 20), (7,))
    plain, scaled = (Simulation(compressor(f"powersgd:rank=3,{EVERY}"), within) for _ in range(2))
    for step in range(3):
        given = gradients(within, step)
        assert torch.equal(plain.step(given)[0] * scale, scaled.step([g * scale for g in given])[0])


@pytest.mark.parametrize(
    ("shape", "rank", "rate", "compressed"),
    [
        ((8, 8), 1, 4.0, False),  # 16 numbers for 64: exactly 4 times fewer is not more than asked
        ((8, 8), 1, 3.9, True),
        ((8, 9), 2, 2.0, True),
        ((8, 9), 2, 2.2, False),
        ((100, 1), 4, 1.0, False),
        ((1000,), 1, 0.0, False),
        ((), 1, 0.0, False),
        ((0, 5), 1, 0.0, False),
    ],
)
def test_a_parameter_is_compressed_where_that_pays(shape, rank, rate, compressed):
    state = PowerSGD(rank=rank, min_compression_rate=rate).init(layout(shape))
    assert len(state.factors.matrices) == compressed
    assert state.whole == (() if compressed or 0 in shape else (slice(0, math.prod(shape)),))


def test_q_depends_on_name_and_seed_alone():
    alone = q_of(layout((16, 12), names=["a"]))["a"]
    within = layout((9,), (30, 40), (16, 12), names=["x", "b", "a"], world_size=4)
    assert all(torch.equal(q_of(placed(within, rank=rank))["a"], alone) for rank in range(4))
    assert not torch.equal(q_of(layout((16, 12), names=["b"]))["b"], alone)
    assert not torch.equal(q_of(layout((16, 12), names=["a"]), seed=1)["a"], alone)
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        assert torch.equal(q_of(layout((16, 12), names=["a"]))["a"], alone)


def test_q_is_standard_normal():
    q = q_of(layout((1000, 1000), names=["a"]), rank=8)["a"]
    assert abs(q.mean().item()) < 0.05
    assert abs(q.std().item() - 1) < 0.05


@pytest.mark.parametrize("beside", [True, False])
def test_what_was_held_back_of_a_parameter_that_is_sent_whole_is_sent_and_nothing_of_it_stays(beside):
    within = layout((30, 20), (7,), world_size=1)
    (given,), (before,) = (gradients(within, step) for step in range(2))
    due = (given + before)[600:]
    after = torch.full_like(before, torch.nan) if beside else before
    compressor = PowerSGD(rank=2)
    (average,) = simulate([compressor.reduce(given.clone(), compressor.init(within), Residual(before, after))])
    assert torch.equal(average[600:], due)
    assert not after[600:].any()


def test_without_warm_start_every_step_begins_at_a_new_q_the_same_in_every_run():
    within = layout((30, 20))
    given = gradients(within)
    runs = [Simulation(compressor("powersgd:rank=1,warm_start=false,error_feedback=false"), within) for _ in range(2)]
    outs = [[run.step(given)[0] for _ in range(3)] for run in runs]
    assert all(map(torch.equal, *outs))
    assert not torch.allclose(outs[0][0], outs[0][1], atol=1e-3)
    assert not torch.allclose(outs[0][1], outs[0][2], atol=1e-3)


@pytest.mark.parametrize("numel", [*range(1, 40), 1009, 12345, 10**6, 2**20 + 7])
@pytest.mark.parametrize("rank", [1, 4])
def test_the_batched_matrix_is_nearly_square_and_sends_no_more_than_a_square_would(numel, rank):
    rows, columns = near_square(numel, rank)
    side = math.isqrt(numel)
    assert rows * columns <= numel < rows * (columns + 1)
    assert 0.8 * side < rows <= side
    sent = rank * (rows + columns) + numel - rows * columns
    assert sent <= rank * (side + numel // side) + numel % side


def test_batched_powersgd_is_powersgd_on_the_bucket_as_one_matrix():
    within = layout((10, 10), (20,), (31,))
    rows, columns = near_square(151, 2)
    matrix = layout((rows, columns), (151 - rows * columns,))
    batched = Simulation(ErrorFeedback(BatchedPowerSGD(rank=2)), within)
    plain = Simulation(ErrorFeedback(PowerSGD(rank=2)), matrix)
    for step in range(3):
        assert torch.equal(batched.step(gradients(within, step))[0], plain.step(gradients(within, step))[0])


@pytest.mark.parametrize(("payload", "off"), [("int8", 0.05), ("int4", 0.3)])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_in_few_bits_every_step_is_the_paper_s_to_their_rounding(world_size, payload, off):
    within = layout((96, 64), (40,), names=["weight", "bias"], world_size=world_size)
    simulation = Simulation(compressor(f"powersgd:rank=3,payload={payload}"), within)
    q = q_of(within, rank=3)["weight"].numpy().T
    for step in range(3):
        given = gradients(within, step)
        held = [state.residual.flat.clone() for state in simulation.states]
        summed = [g + before for g, before in zip(given, held, strict=True)]
        matrices = [each[:6144].double().numpy().reshape(96, 64) for each in summed]
        expected, _ = paper(matrices, q)
        out = simulation.step(given)[0]
        q = simulation.states[0].inner.q.flat.view(3, 64).numpy().T
        assert numpy.linalg.norm(out[:6144].numpy().reshape(96, 64) - expected) < off * numpy.linalg.norm(expected)
        exact = sum(each[6144:] for each in summed) / world_size
        assert (out[6144:] - exact).norm() < off * exact.norm()


@pytest.mark.parametrize("payload", ["int8", "int4"])
def test_in_few_bits_what_ranks_differ_in_does_not_pile_up(payload):
    """With floats it does, as the root of the steps, and cancels in the mean; bytes of it would have large steps."""
    within = layout((64, 48))
    held = {}
    for each in ("float", payload):
        simulation = Simulation(compressor(f"powersgd:rank=4,payload={each}"), within)
        for step in range(100):
            given = gradients(within, step)
            simulation.step(given)
        held[each] = simulation.states[0].residual.flat.norm() / given[0].norm()
    assert held["float"] > 6
    assert held[payload] < 3.5


@pytest.mark.parametrize(("payload", "bits"), [("int8", 8), ("int4", 4)])
def test_few_bits_are_so_many_bytes_and_twice_the_rounds(payload, bits):
    within = layout((1024, 1024), (1024,), world_size=4)
    floats, packed = (dry_run(compressor(f"powersgd:payload={each}"), within) for each in ("float", payload))
    assert (floats.rounds, packed.rounds) == (2, 4)
    scales = 32 / 128  # bits of an element's share
    of_rows = 2 * 3 * (32 + 16 + 16) if bits == 4 else 0  # a bit for each row of P, of Q and of vectors, on 4 ranks
    assert packed.sent_bytes == pytest.approx(floats.sent_bytes * (bits + scales) / 32 + of_rows, rel=0.05)


def test_other_payloads_are_refused():
    with pytest.raises(ValueError, match="payload is float, int8 or int4, got 'int3'"):
        PowerSGD(payload="int3")
