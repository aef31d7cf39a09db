"""Rotations of blocks, against the Hadamard matrix by its closed formula."""

import pytest
import torch

from gradwire.kernels import rotate_blocks

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


def test_an_outlier_is_spread_over_its_block_and_no_other():
    values = torch.zeros(64)
    values[20] = 8.0
    rotate_blocks(values, torch.ones(16))
    assert values.view(4, 16).abs().tolist() == [[0.0] * 16, [2.0] * 16, [0.0] * 16, [0.0] * 16]


def test_an_empty_vector_is_left_alone():
    rotate_blocks(torch.empty(0), torch.ones(8))
