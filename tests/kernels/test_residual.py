"""What is held back after a step is written beside what was held back before it: to the bit what a step in place leaves."""

from functools import partial

import pytest
import torch

from gradwire import kernels
from gradwire.kernels import Factors, Matrix, Residual

from ..residuals import in_place

pytestmark = pytest.mark.usefixtures("backend")
GRADS = [torch.float32, torch.bfloat16, torch.float16]


def numbers(size, dtype=torch.float32, seed=0):
    first, second = torch.randn(2, size, generator=torch.Generator().manual_seed(seed), device="cpu")
    return (first * second.square()).to(torch.get_default_device(), dtype)


def signs(grad, residual, block, rotate=False):
    rows, turn = -(-len(grad) // (2 * block)), numbers(block, seed=3).sign() if rotate else None
    scales, bits = torch.zeros(rows, 2), torch.zeros(rows, block // 4, dtype=torch.uint8)
    kernels.sign_pack(grad, residual, scales, bits, 2 * block, turn)
    return scales, bits


def quantized(grad, residual, block, bits=8, seed=-1, rotate=False):
    rows, turn = -(-len(grad) // block), numbers(block, seed=3).sign() if rotate else None
    scales, codes = torch.zeros(rows, 1), torch.zeros(rows, block * bits // 8, dtype=torch.int8)
    kernels.quantize_blocks(grad, residual, scales, codes, block, bits, turn, seed)
    return scales, codes


def selected(grad, residual, k, length, dtype=torch.float32):
    rows = -(-len(grad) // length)
    indices, values = torch.zeros(rows, k, dtype=torch.int32), torch.zeros(rows, k, dtype=dtype)
    kernels.select_largest(grad, residual, indices, values, length)
    return indices, values


def low_rank(grad, residual, rank):
    """The two steps of PowerSGD that touch the residual: the first goes from before to after, the other stays there."""
    rows = len(grad) // 60
    factors = Factors((Matrix(0, rows, 60, rank),))
    q, p = numbers(factors.right_offsets[-1], seed=2), torch.zeros(factors.left_offsets[-1])
    kernels.low_rank_left(grad, residual, factors, q, p)
    summed, grad = residual.after[: rows * 60].clone(), grad.clone()
    kernels.low_rank_finish(grad, residual.after, factors, p, q)
    residual.after[rows * 60 :] = 0  # of no matrix, so none of theirs
    return p, summed, grad


ENCODERS = {
    "signs, a block in registers": partial(signs, block=64),
    "signs, a block of several units": partial(signs, block=1_032),
    "signs, a block of several passes": partial(signs, block=9_000),
    "signs of rotated blocks": partial(signs, block=64, rotate=True),
    "quantization": partial(quantized, block=1_000),
    "quantization of rotated blocks": partial(quantized, block=128, bits=4, rotate=True),
    "quantization to 4 bits": partial(quantized, block=1_000, bits=4),
    "quantization to 2 bits": partial(quantized, block=128, bits=2),
    "quantization at random": partial(quantized, block=1_000, seed=7),
    "selection from short rows": partial(selected, k=9, length=200),
    "selection from a long row": partial(selected, k=90, length=9_001),
    "selection of nearly all, in 16 bits": partial(selected, k=9_000, length=9_001, dtype=torch.float16),
}
WIDE = {f"products of rank {rank}": partial(low_rank, rank=rank) for rank in (1, 4, 7, 33)}


def beside_and_in_place(encode, grad, offset=0):
    """Results of both, as lists of tensors, the residual last; of that beside, what it read is as it was.

    `offset`: elements between the start of an allocation and the residual after.
    """
    held = numbers(len(grad), seed=1)
    before, same = held.clone(), held.clone()
    after = held.new_full((offset + len(held),), torch.nan)[offset:]
    found = [*encode(grad.clone(), Residual(before, after)), after]
    expected = [*encode(grad.clone(), in_place(same)), same]
    assert torch.equal(before, held)
    return found, expected


@pytest.mark.parametrize("dtype", GRADS, ids=str)
@pytest.mark.parametrize("name", ENCODERS)
def test_a_residual_written_beside_the_old_one_is_that_written_over_it(name, dtype):
    found, expected = beside_and_in_place(ENCODERS[name], numbers(9_001, dtype))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", [name for name in ENCODERS if "rotated" not in name])  # which take its memory
def test_the_gradient_is_left_as_it_is(name):
    grad, held = numbers(9_001), numbers(9_001, seed=1)
    for residual in (None, Residual(held, torch.empty_like(held)), in_place(held)):
        ENCODERS[name](grad, residual)
        assert torch.equal(grad, numbers(9_001))


@pytest.mark.parametrize("name", WIDE)
def test_the_matrices_of_a_residual_are_written_beside_the_old_ones(name):
    found, expected = beside_and_in_place(WIDE[name], numbers(9_001))
    assert all(map(torch.equal, found, expected))


def test_what_lies_between_matrices_is_not_written():
    factors = Factors((Matrix(3, 4, 5, 1), Matrix(30, 5, 4, 2)))
    after, p = torch.full((60,), 7.0), torch.zeros(factors.left_offsets[-1])
    kernels.low_rank_left(torch.ones(60), Residual(torch.ones(60), after), factors, torch.ones(13), p)
    assert after.tolist() == [7.0] * 3 + [2.0] * 20 + [7.0] * 7 + [2.0] * 20 + [7.0] * 10
