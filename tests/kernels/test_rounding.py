"""What an average loses where it is rounded to 16 bits is added to a residual, by every backend that is compiled."""

import pytest
import torch

from gradwire import kernels

from .native_given import numbers, same

SIZES = [1, 7, 1003, 70_001]
NARROW = [torch.bfloat16, torch.float16]
CODES = {(8, 0): 128, (8, 4): 64, (4, 0): 32, (2, -1): 128}


def both(run, size, dtype):
    """Whether an operation, given an output and a residual, does what its mean in float32 says."""
    out, held = torch.full((size,), torch.nan, dtype=dtype), numbers(size, seed=5)
    wide, before = torch.empty(size), held.clone()
    run(wide, None)
    run(out, held)
    assert torch.equal(out, wide.to(dtype))
    assert torch.equal(held, before + (wide - out.float()))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_a_cast_keeps_what_it_rounds_away(backend, size, dtype):
    source = numbers(size)
    both(lambda out, held: kernels.cast_scaled(source, out, 0.5, held), size, dtype)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize(("bits", "exponent"), list(CODES))
@pytest.mark.parametrize("size", SIZES)
def test_the_mean_of_codes_keeps_what_it_rounds_away(backend, size, bits, exponent, dtype):
    block = CODES[bits, exponent]
    blocks = -(-size // block)
    scales, codes = torch.zeros(3, 1, blocks), torch.zeros(3, 1, blocks * block * bits // 8, dtype=torch.int8)
    for voter in range(3):
        given = numbers(size, seed=voter)
        kernels.quantize_blocks(given, None, scales[voter], codes[voter], blocks * block, bits, exponent)
    both(lambda out, held: kernels.dequantize_mean(scales, codes, out, bits, exponent, held), size, dtype)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_the_mean_of_signs_keeps_what_it_rounds_away(backend, size, dtype):
    blocks = -(-size // 64)
    scales = numbers(3 * blocks).abs().view(3, 1, blocks)
    bits = torch.randint(0, 256, (3, 1, blocks * 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    both(lambda out, held: kernels.sign_unpack_mean(scales, bits, out, held), size, dtype)


def test_nothing_is_lost_where_the_output_is_as_wide(backend):
    source, out, held = numbers(1000), torch.empty(1000), numbers(1000, seed=2)
    before = held.clone()
    kernels.cast_scaled(source, out, 1.0, held)
    assert same(held, before)


def test_a_source_that_is_rounded_already_is_refused(backend):
    if backend == "reference":
        pytest.skip("the reference leaves arguments to torch")
    with pytest.raises(TypeError, match="source is of 32 bits or more"):
        kernels.cast_scaled(numbers(8, torch.float16), torch.empty(8), 1.0, torch.zeros(8))
