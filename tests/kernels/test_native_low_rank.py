"""PowerSGD's arithmetic in C++, on every instruction set."""

import pytest
import torch

from gradwire import kernels
from gradwire.kernels import Factors, Matrix, native

from ..gpu.cases import NAN, check_products, numbers
from ..residuals import in_place
from .native_given import native_of, needs_native

pytestmark = needs_native


def laid_out(shapes):
    starts = [sum(rows * columns for rows, columns, _ in shapes[:index]) for index in range(len(shapes))]
    return Factors(tuple(Matrix(start, *shape) for start, shape in zip(starts, shapes, strict=True)))


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5, 7, 8, 17, 32])
def test_products_of_all_ranks_are_those_of_float64(level, threads, rank):
    shapes = [(rank, rank), (37, 53), (130, 2500), (64, 27 + rank)]
    starts = [sum(rows * columns for rows, columns in shapes[:index]) + 1 for index in range(5)]
    factors = Factors(tuple(Matrix(at, *shape, min(rank, *shape)) for at, shape in zip(starts, shapes, strict=False)))
    check_products(factors, starts[-1])


def products(threads, rank):
    torch.set_num_threads(threads)
    factors = laid_out([(500, 600, rank), (3, 7, 3), (1201, 1003, rank)])  # the last is cut into sums of their own
    size = 500 * 600 + 21 + 1201 * 1003
    grad, residual, q = numbers(size), numbers(size, seed=1), numbers(factors.right_offsets[-1], seed=2)
    p = torch.empty(factors.left_offsets[-1])
    native_of(kernels.low_rank_left)(grad, in_place(residual), factors, q, p)
    native_of(kernels.orthogonalize)(p, factors)
    native_of(kernels.low_rank_right)(residual, factors, p, q)
    native_of(kernels.low_rank_finish)(grad, residual, factors, p, q)
    native_of(kernels.normalize)(q, factors)
    return torch.cat([grad, residual, p, q])


@pytest.mark.parametrize("rank", [3, 4, 6])
def test_all_is_the_same_to_the_bit_for_any_number_of_threads(rank):
    alone = products(1, rank)
    try:
        assert all(torch.equal(products(threads, rank), alone) for threads in (2, 3, 2, 5))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("rank", [4, 9])
def test_sums_over_many_rows_are_those_of_float64(level, threads, rank):
    factors = laid_out([(2_000, 1_001, rank), (5, 3, 2), (30_000, 30, 1), (64, 9_001, rank)])
    last = factors.matrices[-1]
    matrices, p = numbers(last.offset + 64 * 9_001), numbers(factors.left_offsets[-1], seed=1)
    q = torch.full((factors.right_offsets[-1],), NAN)
    kernels.low_rank_right(matrices, factors, p, q)
    parts = zip(factors.full(matrices.double()), factors.left(p.double()), factors.right(q.double()), strict=True)
    for matrix, left, right in parts:
        assert (right - left @ matrix).norm() <= 2e-5 * (left @ matrix).norm()


@pytest.mark.parametrize("shapes", [[(9, 0, 1)], [(64, 64, 33)]])
def test_matrices_that_it_does_not_know_go_to_the_reference(shapes):
    factors = laid_out(shapes)
    p, q = torch.full((factors.left_offsets[-1],), NAN), numbers(factors.right_offsets[-1])
    matrices = numbers(shapes[0][0] * shapes[0][1])
    native_of(kernels.low_rank_left)(matrices, None, factors, q, p)
    expected = torch.empty_like(p)
    kernels.low_rank_left.reference(matrices, None, factors, q, expected)
    assert torch.equal(p, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rank", [1, 3, 4, 9])
@pytest.mark.parametrize("held", [False, True])
def test_16_bit_gradients_give_what_the_same_numbers_give_in_32_rounded_once(level, rank, dtype, held):
    factors = Factors((Matrix(3, 41, 57, rank),))
    size, generator = 3 + 41 * 57 + 5, torch.Generator().manual_seed(rank)
    numbers, before, q = (torch.randn(n, generator=generator) for n in (size, size, factors.right_offsets[-1]))
    found = []
    for kind in (dtype, torch.float32):
        grad, residual = numbers.to(dtype).to(kind), before.clone() if held else None
        p, new_q = torch.zeros(factors.left_offsets[-1]), q.clone()
        kernels.low_rank_left(grad, in_place(residual), factors, q, p)
        kernels.low_rank_right(residual if held else grad, factors, p, new_q)
        matrix = before + numbers.to(dtype) if held else None
        kernels.low_rank_finish(grad, residual, factors, p / p.norm(), new_q / new_q.norm())
        found.append((p, new_q, grad))
        if held:
            inside = slice(3, 3 + 41 * 57)
            assert torch.equal(residual[inside], (matrix - grad.float())[inside])
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[0][2], found[1][2].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [1, 3, 4, 6, 32])
def test_what_every_rank_computes_by_itself_has_the_same_bits_on_every_instruction_set(rank, dtype):
    factors = laid_out([(37, 53, rank), (513, 2500, rank)])
    size = 37 * 53 + 513 * 2500
    before, results = native.library().level(), []
    try:
        for name in native.library().levels():
            assert native.library().choose_level(name)
            grad, residual = numbers(size).to(dtype), numbers(size, seed=1)
            p, q = numbers(factors.left_offsets[-1], seed=2), numbers(factors.right_offsets[-1], seed=3)
            native_of(kernels.orthogonalize)(p, factors)
            native_of(kernels.low_rank_finish)(grad, residual, factors, p, q)
            native_of(kernels.normalize)(q, factors)
            results.append(torch.cat([grad.float(), residual, p, q]))
    finally:
        native.library().choose_level(before)
    assert all(torch.equal(each, results[0]) for each in results)
