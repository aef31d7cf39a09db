"""1-bit payloads, against numpy."""

import numpy
import pytest
import torch

from gradwire.kernels import sign_pack, sign_unpack_mean

from ..residuals import in_place
from .given import numbers

pytestmark = pytest.mark.usefixtures("backend")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SIZES = [1, 7, 8, 9, 1009]
SHAPES = [(8, 8), (64, 8), (64, 64), (1016, 8), (1024, 1024), (1024, 128)]  # (length of a row, elements of a block)


def pack(grad, length, block, residual=None):
    """Scales and bits of all rows, written over garbage."""
    rows = -(-grad.numel() // length)
    scales = torch.full((rows, length // block), torch.nan)
    bits = torch.full((rows, length // 8), 0xA5, dtype=torch.uint8)
    sign_pack(grad, in_place(residual), scales, bits, length)
    return scales, bits


def oracle(values, length, block):
    """Scales and bits in float64."""
    rows = -(-len(values) // length)
    padded = numpy.concatenate([values, numpy.zeros(rows * length - len(values))])
    inside = (numpy.arange(rows * length) < len(values)).reshape(-1, block).sum(1)
    scales = numpy.abs(padded).reshape(-1, block).sum(1) / numpy.maximum(inside, 1)
    bits = numpy.packbits(padded >= 0, bitorder="little")
    return scales.reshape(rows, -1), bits.reshape(rows, -1)


def signed(scales, bits):
    """What a payload says of every element, in float64."""
    signs = numpy.unpackbits(bits.numpy(), bitorder="little").astype(float) * 2 - 1
    return (signs.reshape(scales.numel(), -1) * scales.double().numpy().reshape(-1, 1)).reshape(-1)


@pytest.mark.parametrize(("length", "block"), SHAPES)
@pytest.mark.parametrize("size", SIZES)
def test_scales_are_mean_magnitudes_and_bits_are_signs_lowest_bit_first(size, length, block):
    for dtype in DTYPES:
        grad = numbers(size, dtype)
        scales, bits = pack(grad, length, block)
        expected_scales, expected_bits = oracle(grad.double().numpy(), length, block)
        assert numpy.allclose(scales.numpy(), expected_scales, rtol=2e-6, atol=0)
        assert numpy.array_equal(bits.numpy(), expected_bits)


def test_zero_of_either_sign_counts_as_not_negative():
    scales, bits = pack(torch.tensor([0.0, -0.0] * 4), 8, 8)
    assert bits.tolist() == [[255]]
    assert scales.tolist() == [[0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("length", "block"), SHAPES)
def test_conservation_payload_and_residual_are_the_input(length, block, grad_dtype, dtype):
    for size in SIZES:
        grad, held = numbers(size, grad_dtype), numbers(size, dtype, seed=1)
        residual, corrected = held.clone(), (held + grad).double().numpy()
        payload = pack(grad, length, block, residual)
        kept = residual.double().numpy() + signed(*payload)[:size]
        assert numpy.abs(kept - corrected).max() <= numpy.abs(corrected).max() * torch.finfo(dtype).eps * 2


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_bad_element_spoils_the_scale_of_its_block_and_no_other(bad):
    for dtype in DTYPES:
        grad = torch.ones(64, dtype=dtype)
        grad[20] = bad
        scales, _ = pack(grad, 64, 8)
        assert scales.isfinite().tolist() == [[block != 2 for block in range(8)]]


def test_a_mean_in_the_range_of_float16_survives_a_sum_that_is_not():
    scales, _ = pack(torch.full((1024,), 60000.0, dtype=torch.float16), 1024, 1024)
    assert scales.tolist() == [[60000.0]]


def test_tiny_elements_keep_a_scale():
    scales, _ = pack(torch.tensor([1e-40, -1e-40] * 4), 8, 8)
    assert scales.item() == pytest.approx(1e-40, rel=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("voters", [1, 2, 3, 8])
@pytest.mark.parametrize(("length", "block"), SHAPES)
def test_the_mean_over_voters_is_that_of_scale_times_sign(length, block, voters, dtype):
    for size in SIZES:
        payloads = [pack(numbers(size, torch.float32, seed), length, block) for seed in range(voters)]
        expected = sum(signed(*payload)[:size] for payload in payloads) / voters
        out = torch.full((size,), torch.nan, dtype=dtype)
        sign_unpack_mean(torch.stack([s for s, _ in payloads]), torch.stack([b for _, b in payloads]), out)
        assert numpy.abs(out.double().numpy() - expected).max() <= 4 * max(torch.finfo(dtype).eps, 1.2e-7)


def test_a_bad_scale_of_one_voter_reaches_the_mean_of_its_block_alone():
    scales = torch.tensor([[[torch.nan, 1.0]], [[1.0, 1.0]]])
    out = torch.zeros(16)
    sign_unpack_mean(scales, torch.full((2, 1, 2), 255, dtype=torch.uint8), out)
    assert out[:8].isnan().all()
    assert (out[8:] == 1).all()


def test_an_empty_vector_is_encoded_as_zeros_and_decoded_to_nothing():
    scales, bits = torch.full((1, 1), torch.nan), torch.zeros(1, 1, dtype=torch.uint8)
    sign_pack(torch.empty(0), in_place(torch.empty(0)), scales, bits, 8)
    assert scales.tolist() == [[0.0]]
    assert bits.tolist() == [[255]]
    sign_unpack_mean(scales.unsqueeze(0), bits.unsqueeze(0), torch.empty(0))
