"""Rotations of blocks, against the Hadamard matrix by its closed formula."""

import pytest
import torch

from gradwire import kernels
from gradwire.kernels import Residual, rotate_blocks

pytestmark = pytest.mark.usefixtures("backend")


def hadamard(size):
    """Sylvester's matrix by its formula: -1 to the number of ones that row and column have in common."""
    places = torch.arange(size)
    common = (places[:, None] & places[None, :]).view(size, size)
    ones = sum((common >> bit) & 1 for bit in range(size.bit_length()))
    return 1.0 - 2.0 * (ones % 2).double()


def numbers(size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def parts(size, block):
    """First element and size of each block: whole ones, then smaller powers of two."""
    start = 0
    while start < size:
        while block > size - start:
            block //= 2
        yield start, block
        start += block


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("block", [1, 2, 8, 64, 128, 512])
def test_every_block_is_multiplied_by_its_signs_and_the_orthonormal_matrix(block, dtype):
    signs = numbers(block, seed=1).sign().to(dtype)
    for size in (1, 7, 128, 1009):
        given = numbers(size).to(dtype)
        rotated = given.clone()
        rotate_blocks(rotated, signs)
        for start, width in parts(size, block):
            expected = hadamard(width) @ (given[start : start + width].double() * signs[:width]) / width**0.5
            assert torch.allclose(rotated[start : start + width].double(), expected, atol=2e-6)
        rotate_blocks(rotated, signs, back=True)
        assert torch.allclose(rotated, given, atol=2e-6)


def test_an_empty_vector_is_left_alone():
    rotate_blocks(torch.empty(0), torch.ones(8))


CODES = {"signs": (), "8 bits": (8,), "4 bits": (4,), "2 bits": (2,)}


def encoded(grad, residual, block, code, signs=None):
    """Scales and codes, two blocks to a row."""
    rows = -(-len(grad) // (2 * block))
    scales = torch.full((rows, 2), torch.nan)
    if not code:
        bits = torch.zeros(rows, block // 4, dtype=torch.uint8)
        kernels.sign_pack(grad, residual, scales, bits, 2 * block, signs)
        return scales, bits
    codes = torch.zeros(rows, 2 * block * code[0] // 8, dtype=torch.int8)
    kernels.quantize_blocks(grad, residual, scales, codes, 2 * block, *code, signs)
    return scales, codes


def decoded(payload, size, code, residual, dtype, signs=None):
    """The mean of a payload and of one with twice its scales."""
    out, (scales, codes) = torch.full((size,), torch.nan, dtype=dtype), payload
    votes = torch.stack([scales, scales * 2]), torch.stack([codes, codes])
    decode = kernels.dequantize_mean if code else kernels.sign_unpack_mean
    decode(*votes, out, *code, residual, signs)
    return out


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_codes_by_the_signs_of_a_rotation_are_those_of_rotated_blocks(code, dtype, held):
    wide = torch.promote_types(dtype, torch.float32)
    for block, size in ((8, 1), (8, 1009), (64, 128), (128, 1009), (1024, 5000)):
        grad, turn = numbers(size).to(dtype), numbers(block, seed=1).sign().to(wide)
        residual = torch.zeros(size, dtype=wide)
        before = numbers(size, seed=2).to(wide) if held else residual
        values = before + grad
        rotate_blocks(values, turn)
        rest = torch.zeros_like(values)
        expected = encoded(values, Residual(rest, rest) if held else None, block, code)
        rotate_blocks(rest, turn, True)
        found = encoded(grad.clone(), Residual(before.clone(), residual) if held else None, block, code, turn)
        assert torch.equal(found[1], expected[1])
        assert torch.allclose(found[0], expected[0], rtol=1e-6, atol=0)
        assert not held or torch.allclose(residual, rest, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_a_mean_by_the_signs_of_a_rotation_is_rotated_back_and_rounded_once(code, dtype):
    wide = torch.promote_types(dtype, torch.float32)
    for block, size in ((8, 1), (64, 128), (128, 1009)):
        turn = numbers(block, seed=1).sign()
        payload = encoded(numbers(size), None, block, code, turn)
        expected = decoded(payload, size, code, None, wide)
        rotate_blocks(expected, turn.to(wide), True)
        lost = torch.ones(size, dtype=wide)
        found = decoded(payload, size, code, lost, dtype, turn.to(wide))
        assert torch.equal(found, expected.to(dtype))
        assert dtype == wide or torch.allclose(lost, 1 + expected - found, rtol=0, atol=1e-6)
