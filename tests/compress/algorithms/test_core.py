"""A core of low rank and codes of the rest: what is in the average, what is held back, what travels, what is refused."""

import pytest
import torch

from gradwire.compress import Int4, Simulation, TwoShot, compressor, dry_run, specification
from gradwire.compress.algorithms.core import Core
from gradwire.compress.shards.codec import codec_of
from gradwire.hooks.collectives.compress_group import codec_for

from ..given import gradients, layout

SHAPES = ((96, 64), (33,), (5, 7))  # the last one is too small for a core


def relative_error(average, wanted):
    return float((average - wanted).norm() / wanted.norm())


def spectra(world_size, steps):
    """Gradients of each step and rank: two large singular values that stay, and noise."""
    generator = torch.Generator().manual_seed(0)
    large = 30 * torch.randn(96, 2, generator=generator) @ torch.randn(2, 64, generator=generator)
    for _ in range(steps):
        yield [
            torch.cat(
                [(large + torch.randn(96, 64, generator=generator)).flatten(), torch.randn(68, generator=generator)]
            )
            for _ in range(world_size)
        ]


@pytest.mark.parametrize("feedback", ["true", "false"])
@pytest.mark.parametrize("bits", [2, 4])
def test_errors_are_those_of_what_the_core_lacks(bits, feedback):
    """By an oracle: of the exact mean without its two largest singular values, an error as of the codec alone."""
    within, found = layout(*SHAPES, world_size=4), {}
    for core in (0, 2):
        simulation = Simulation(compressor(f"int{bits}:core={core},error_feedback={feedback}"), within)
        for given in spectra(4, 5):
            wanted = sum(given) / 4
            found[core] = float((simulation.step(given)[0] - wanted)[: 96 * 64].norm())
    rest = float(torch.linalg.svdvals(wanted[: 96 * 64].view(96, 64))[2:].norm())
    plain = found[0] / float(wanted[: 96 * 64].norm())
    assert found[2] < found[0] / 8
    assert found[2] < 4 * plain * rest


def test_vectors_and_small_matrices_have_the_codes_alone_and_a_bucket_of_them_the_codec_s_rounds():
    within = layout((33,), (5, 7), world_size=4)
    plain, cored = (Simulation(compressor(spec), within) for spec in ("int4", "int4:core=2"))
    for step in range(3):
        given = gradients(within, step)
        assert torch.equal(plain.step(given)[0], cored.step(given)[0])
    assert cored.traffic == plain.traffic


def test_the_core_adds_the_bytes_of_its_factors_in_8_bits_and_four_rounds():
    within = layout(*SHAPES, world_size=4)
    plain, cored = (dry_run(compressor(spec), within) for spec in ("int4", "int4:core=2"))
    codes = 2 * (96 + 64) * (1 + 1 / 4)  # of both factors, to the ranks that average them and from one of them
    assert cored.rounds == plain.rounds + 4
    assert codes <= cored.payload_bytes - plain.payload_bytes <= 1.5 * codes  # scales, and a bit for each row


def test_servers_hold_back_as_workers_do():
    with_feedback, without = (compressor(f"int4:core=4,error_feedback={each}") for each in ("true", "false"))
    assert with_feedback.inner.inner.rest.error_feedback
    assert not without.inner.rest.error_feedback
    assert compressor("int4:core=4,residual_bits=8").inner.inner.rest.residual_bits == 8
    assert isinstance(without.inner, Core)
    assert specification(with_feedback) == "int4:core=4"


def test_16_bit_gradients_lose_no_more_than_their_rounding():
    within = layout(*SHAPES, dtype=torch.bfloat16, world_size=2)
    simulation = Simulation(compressor("int4:core=2"), within)
    given = [each.bfloat16() for each in next(spectra(2, 1))]
    average = simulation.step(given)[0]
    assert average.dtype == torch.bfloat16
    assert relative_error(average.float(), sum(each.float() for each in given) / 2) < 0.06


def test_what_needs_no_whole_gradients_refuses_it():
    with pytest.raises(
        ValueError, match="core= needs whole matrices, which no rank has here: leave it out of 'int4:core"
    ):
        codec_of(compressor("int4:core=4"), "int4:core=4")
    with pytest.raises(ValueError, match="TwoShot sends codes without a core, got Int4"):
        TwoShot(Int4(core=2)).init(layout((33,)))
    with pytest.raises(ValueError, match="error feedback and core= need a hook"):
        codec_for("int4:core=4")
