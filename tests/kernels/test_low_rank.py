"""The products and bases of PowerSGD, against float64."""

import numpy
import pytest
import torch

from gradwire import kernels
from gradwire.kernels import Factors, Matrix

from ..residuals import in_place
from .given import numbers, poisoned

pytestmark = pytest.mark.usefixtures("backend")
SHAPES = {  # (rows, columns, rank)
    "one element": [(1, 1, 1)],
    "one row": [(1, 9, 1)],
    "one column": [(1009, 1, 1)],
    "full rank": [(4, 4, 4), (3, 7, 3), (7, 3, 3)],
    "many alike": [(16, 8, 2)] * 5,
    "many kinds": [(1, 1, 1), (9, 8, 2), (8, 9, 4), (101, 103, 4), (1, 7, 1), (9, 8, 2), (9, 8, 3), (64, 27, 1)],
}
EPSILON = {torch.float32: 1.2e-7, torch.float64: 2.3e-16}
DTYPES = list(EPSILON)


def laid_out(shapes, gap=3):
    """Matrices with other numbers between them, and the size of the bucket."""
    matrices, offset = [], gap
    for rows, columns, rank in shapes:
        matrices.append(Matrix(offset, rows, columns, rank))
        offset += rows * columns + gap
    return Factors(tuple(matrices)), offset


def wide(flat):
    return flat.double().numpy()


def parts(flat, shapes, which):
    """The matrices or factors in a flat buffer, cut by hand; P and Q as (rows, rank) and (columns, rank)."""
    found, offset = [], 0
    for rows, columns, rank in shapes:
        if which == "full":
            offset += 3
        side = {"full": rows, "left": rank, "right": rank}[which]
        other = {"full": columns, "left": rows, "right": columns}[which]
        part = wide(flat)[offset : offset + side * other].reshape(side, other)
        found.append(part if which == "full" else part.T)
        offset += side * other
    return found


def close(found, expected, dtype, size):
    """Equal up to the rounding of sums of `size` products of unit size."""
    return all(numpy.abs(f - e).max() <= 8 * size * EPSILON[dtype] for f, e in zip(found, expected, strict=True))


@pytest.fixture(params=SHAPES)
def shapes(request):
    return SHAPES[request.param]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.mark.parametrize("with_residual", [False, True])
def test_left_is_m_q_and_the_residual_takes_up_the_gradient(shapes, dtype, with_residual):
    factors, size = laid_out(shapes)
    grad, held, q = numbers(size, dtype), numbers(size, dtype, 1), numbers(factors.right_offsets[-1], dtype, 2)
    residual = held.clone() if with_residual else None
    p, before = poisoned(factors.left_offsets[-1], dtype), grad.clone()
    kernels.low_rank_left(grad, in_place(residual), factors, q, p)
    total = grad + held if with_residual else grad
    expected = [m @ f for m, f in zip(parts(total, shapes, "full"), parts(q, shapes, "right"), strict=True)]
    assert close(parts(p, shapes, "left"), expected, dtype, size)
    assert torch.equal(grad, before)
    if residual is not None:
        assert all(map(numpy.array_equal, parts(residual, shapes, "full"), parts(total, shapes, "full")))


def test_right_is_m_transposed_p(shapes, dtype):
    factors, size = laid_out(shapes)
    grad, p = numbers(size, dtype), numbers(factors.left_offsets[-1], dtype)
    q = poisoned(factors.right_offsets[-1], dtype)
    kernels.low_rank_right(grad, factors, p, q)
    expected = [m.T @ f for m, f in zip(parts(grad, shapes, "full"), parts(p, shapes, "left"), strict=True)]
    assert close(parts(q, shapes, "right"), expected, dtype, size)


@pytest.mark.parametrize("with_residual", [False, True])
def test_finish_is_p_q_transposed_and_the_residual_keeps_the_difference(shapes, dtype, with_residual):
    factors, size = laid_out(shapes)
    p, q = numbers(factors.left_offsets[-1], dtype), numbers(factors.right_offsets[-1], dtype)
    held = numbers(size, dtype)
    grad, residual = poisoned(size, dtype), held.clone() if with_residual else None
    kernels.low_rank_finish(grad, residual, factors, p, q)
    product = [left @ right.T for left, right in zip(parts(p, shapes, "left"), parts(q, shapes, "right"), strict=True)]
    assert close(parts(grad, shapes, "full"), product, dtype, 8)
    if residual is not None:
        kept = [m - product for m, product in zip(parts(held, shapes, "full"), product, strict=True)]
        assert close(parts(residual, shapes, "full"), kept, dtype, 8)


def test_what_lies_between_the_matrices_is_left_as_it_is(shapes, dtype):
    factors, size = laid_out(shapes)
    between = numpy.ones(size, dtype=bool)
    for m in factors.matrices:
        between[m.offset : m.offset + m.rows * m.columns] = False
    grad, residual = numbers(size, dtype), numbers(size, dtype, 1)
    before = [grad[between].clone(), residual[between].clone()]
    p, q = numbers(factors.left_offsets[-1], dtype), numbers(factors.right_offsets[-1], dtype)
    kernels.low_rank_left(grad, in_place(residual), factors, q, p)
    kernels.low_rank_finish(grad, residual, factors, p, q)
    assert torch.equal(grad[between], before[0])
    assert torch.equal(residual[between], before[1])


def test_without_matrices_nothing_happens():
    empty, grad, none = torch.empty(0), torch.ones(3), Factors(())
    kernels.low_rank_left(grad, None, none, empty, empty)
    kernels.orthogonalize(empty, none)
    kernels.low_rank_right(grad, none, empty, empty)
    kernels.normalize(empty, none)
    kernels.low_rank_finish(grad, torch.ones(3), none, empty, empty)
    assert grad.tolist() == [1.0, 1.0, 1.0]
