"""Payloads of 8, 4 and 2 bits, against numpy, and random words against published ones."""

import numpy
import pytest
import torch

from gradwire.kernels import dequantize_mean, quantize_blocks
from gradwire.kernels.quantization import philox, uniform

from ..residuals import in_place
from .given import numbers

pytestmark = pytest.mark.usefixtures("backend")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SIZES = [1, 8, 9, 1009]
# bits: the largest level, the scales that the largest magnitude is, and how far levels are from whole numbers
BITS = {8: (127, 127, 0), 4: (7, 8, 0), 2: (1.5, 2, 0.5)}
SHAPES = [(8, 8), (64, 8), (1016, 1016), (1024, 128)]  # (length of a row, elements of a block)


def encode(grad, length, block, residual=None, bits=8, **random):
    """Scales and codes of all rows, written over garbage."""
    rows = -(-grad.numel() // length)
    scales = torch.full((rows, length // block), torch.nan)
    codes = torch.full((rows, length * bits // 8), -99, dtype=torch.int8)
    quantize_blocks(grad, in_place(residual), scales, codes, length, bits, **random)
    return scales, codes


def levels(codes, bits=8):
    """What codes stand for in units of their scales, the first of a byte in its lowest bits."""
    whole = codes.numpy().view(numpy.uint8).astype(int)[..., None] >> numpy.arange(0, 8, bits) & 2**bits - 1
    return (whole - (whole >= 2 ** (bits - 1)) * 2**bits).reshape(*codes.shape[:-1], -1) + BITS[bits][2]


def decoded(scales, codes, size, bits=8):
    """What a payload says of every element, in float64."""
    blocks = levels(codes, bits).reshape(scales.numel(), -1) * scales.double().numpy().reshape(-1, 1)
    return blocks.reshape(-1)[:size]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("length", "block"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_are_the_nearest_levels_of_a_part_of_the_largest_magnitude(length, block, dtype, bits):
    limit, steps, _ = BITS[bits]
    for size in SIZES:
        grad = numbers(size, dtype)
        scales, codes = encode(grad, length, block, bits=bits)
        padded = numpy.zeros(len(codes) * length)
        padded[:size] = grad.double().numpy()
        largest = numpy.abs(padded).reshape(-1, block).max(1)
        assert numpy.allclose(scales.view(-1).numpy(), largest / steps, rtol=1e-6, atol=0)
        exact = padded.reshape(-1, block) / numpy.where(largest == 0, 1, largest)[:, None] * steps
        found = levels(codes, bits).reshape(-1, block)
        assert numpy.abs(found).max() <= limit
        assert numpy.abs(found - exact.clip(-limit, limit)).max() <= 0.5001


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("seed", [-1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("length", "block"), SHAPES)
def test_conservation_payload_and_residual_are_the_input(length, block, grad_dtype, dtype, seed, bits):
    for size in SIZES:
        grad, held = numbers(size, grad_dtype), numbers(size, dtype, seed=1)
        residual, corrected = held.clone(), (held + grad).double().numpy()
        payload = encode(grad, length, block, residual, bits, seed=seed)
        kept = residual.double().numpy() + decoded(*payload, size, bits)
        assert numpy.abs(kept - corrected).max() <= numpy.abs(corrected).max() * 3e-7
        assert (levels(payload[1], bits).reshape(-1)[size:] == BITS[bits][2]).all()


@pytest.mark.parametrize("bits", BITS)
def test_random_rounding_is_right_on_average_and_off_by_less_than_one(bits):
    largest, _, offset = BITS[bits]
    grad = torch.full((4096,), 0.3)
    grad[::1024] = 1.0
    scales, codes = encode(grad, 4096, 1024, bits=bits, seed=3)
    found, below = levels(codes, bits)[0], numpy.floor(0.3 * largest - offset) + offset
    drawn, part = found[(grad == 0.3).numpy()], 0.3 * largest - below
    assert set(drawn.tolist()) == {below, below + 1}
    assert abs(drawn.mean() - 0.3 * largest) < 5 * (part * (1 - part) / len(drawn)) ** 0.5
    assert (found[::1024] == largest).all()
    assert torch.allclose(scales, torch.tensor(1 / largest))


def test_random_numbers_go_on_where_a_counter_says_and_differ_between_seeds():
    grad = numbers(2048, torch.float32).clamp(-1, 1)
    grad[::64] = 1.0
    _, whole = encode(grad, 64, 64, seed=11)
    _, second = encode(grad[1024:].clone(), 64, 64, seed=11, counter=1024 // 4)
    assert torch.equal(whole[16:], second)
    assert not torch.equal(whole, encode(grad, 64, 64, seed=12)[1])
    assert torch.equal(whole, encode(grad, 64, 64, seed=11)[1])


def test_words_are_those_published_for_philox():
    """Known answers of Random123 (Salmon et al. 2011), for counters and keys of zeros and of ones."""
    for word, expected in (
        (0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (0xFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ):
        counters = (torch.tensor([word]),) * 4
        assert tuple(each.item() for each in philox(word << 32 | word, counters)) == expected


def test_uniform_numbers_are_in_range_and_of_the_right_mean():
    drawn = uniform(1, 0, 100_001, torch.device("cpu"))
    assert len(drawn) == 100_001
    assert 0 <= drawn.min() < drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 5 * (1 / 12 / 100_001) ** 0.5


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_bad_element_spoils_the_scale_of_its_block_and_no_other(bad):
    grad, residual = torch.ones(64), torch.zeros(64)
    grad[20] = bad
    scales, codes = encode(grad, 64, 8, residual)
    assert scales.isfinite().tolist() == [[block != 2 for block in range(8)]]
    assert residual.isfinite().tolist() == [not 16 <= place < 24 for place in range(64)]
    assert not codes[0, 16:24].any()


def test_numbers_of_any_size_are_encoded():
    for largest in (1e-45, 1e-40, 1e-37, 1.0, 3e38):
        residual = torch.zeros(8)
        grad = torch.tensor([largest, -largest] + [0.0] * 6)
        _, codes = encode(grad, 8, 8, residual)
        assert codes[0, :3].tolist() == [127, -127, 0]
        assert residual.isfinite().all()
    assert not encode(torch.zeros(8), 8, 8)[1].any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("voters", [1, 2, 5])
@pytest.mark.parametrize(("length", "block"), SHAPES)
def test_the_mean_over_voters_is_that_of_scale_times_code(length, block, voters, dtype, bits):
    for size in SIZES:
        payloads = [encode(numbers(size, torch.float32, seed), length, block, bits=bits) for seed in range(voters)]
        expected = sum(decoded(*payload, size, bits) for payload in payloads) / voters
        out = torch.full((size,), torch.nan, dtype=dtype)
        dequantize_mean(torch.stack([s for s, _ in payloads]), torch.stack([c for _, c in payloads]), out, bits)
        assert numpy.abs(out.double().numpy() - expected).max() <= 4 * max(torch.finfo(dtype).eps, 1.2e-7)


def test_an_empty_vector_is_encoded_as_zeros_and_decoded_to_nothing():
    scales, codes = torch.full((1, 1), torch.nan), torch.full((1, 8), 9, dtype=torch.int8)
    quantize_blocks(torch.empty(0), in_place(torch.empty(0)), scales, codes, 8)
    assert scales.tolist() == [[0.0]]
    assert not codes.any()
    dequantize_mean(scales.unsqueeze(0), codes.unsqueeze(0), torch.empty(0))


def test_rows_of_a_payload_that_holds_other_things_too_are_left_as_they_are():
    rows = torch.full((3, 4 + 64 + 4), 7, dtype=torch.uint8)
    quantize_blocks(
        numbers(150, torch.float32), None, rows[:, :4].view(torch.float32), rows[:, 4:68].view(torch.int8), 64
    )
    assert (rows[:, 68:] == 7).all()
