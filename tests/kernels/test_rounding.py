"""What an average loses where it is rounded to 16 bits is added to a residual: by every backend, against float64."""

import pytest
import torch

from gradwire import kernels

from ..gpu.cases import numbers, same
from .test_quantization import levels
from .test_signs import signed

SIZES = [1, 7, 1003, 70_001]
NARROW = [torch.bfloat16, torch.float16]
CODES = {8: 128, 4: 32, 2: 128}  # bits: elements of a block
SUMS = 1e-6  # what sums of a few float32 may be off, of the sum of their magnitudes


def check(run, terms, dtype):
    """That an operation writes the mean of `terms`, float64 (voters, elements), to nearest, and the rest to a residual."""
    mean, size = terms.mean(0), terms.abs().mean(0)
    out, held = torch.full(mean.shape, torch.nan, dtype=dtype), numbers(len(mean), seed=5)
    before = held.clone()
    run(out, held)
    lost, format = mean - out.double(), torch.finfo(dtype)
    assert (lost.abs() <= format.eps / 2 * mean.abs().clamp(min=format.tiny) + SUMS * size).all()
    kept = held.double() - before.double()
    assert ((kept - lost).abs() <= SUMS * (size + before.abs())).all()


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_a_cast_keeps_what_it_rounds_away(backend, size, dtype):
    source = numbers(size)
    check(lambda out, held: kernels.cast_scaled(source, out, 0.5, held), source.double().unsqueeze(0) / 2, dtype)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("bits", CODES)
@pytest.mark.parametrize("size", SIZES)
def test_the_mean_of_codes_keeps_what_it_rounds_away(backend, size, bits, dtype):
    size = min(size, 9_001) if backend == "triton" else size  # enough for some tiles
    block = CODES[bits]
    blocks = -(-size // block)
    scales, codes = torch.zeros(3, 1, blocks), torch.zeros(3, 1, blocks * block * bits // 8, dtype=torch.int8)
    for voter in range(3):
        given = numbers(size, seed=voter)
        kernels.quantize_blocks(given, None, scales[voter], codes[voter], blocks * block, bits)
    scaled = torch.from_numpy(levels(codes, bits)).view(3, blocks, block) * scales.double().view(3, blocks, 1)
    terms = scaled.view(3, -1)[:, :size]
    check(lambda out, held: kernels.dequantize_mean(scales, codes, out, bits, held), terms, dtype)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_the_mean_of_signs_keeps_what_it_rounds_away(backend, size, dtype):
    blocks = -(-size // 64)
    scales = numbers(3 * blocks).abs().view(3, 1, blocks)
    bits = torch.randint(0, 256, (3, 1, blocks * 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    terms = torch.from_numpy(signed(scales, bits)).view(3, -1)[:, :size]
    check(lambda out, held: kernels.sign_unpack_mean(scales, bits, out, held), terms, dtype)


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
