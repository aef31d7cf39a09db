"""Orthonormal bases, of whatever finite matrices training comes up with, and unit vectors."""

import numpy
import pytest
import torch

from gradwire import kernels
from gradwire.kernels import Factors, Matrix

from .test_low_rank import DTYPES, SHAPES, laid_out, parts
from .test_low_rank import numbers as normal

pytestmark = pytest.mark.usefixtures("backend")
EPSILON = {torch.float32: 1.2e-7, torch.float64: 2.3e-16}
SIZES = [(1, 1), (2, 1), (2, 2), (7, 3), (8, 8), (9, 4), (103, 4), (1009, 1), (211, 16)]  # (rows, rank)
SCALES = [1e-44, 1e-40, 1e-38, 1e-30, 1e-20, 1.0, 1e20, 1e38]


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator, dtype=torch.float64).sub_(0.5).numpy()


def orthogonalized(*matrices, dtype=torch.float32):
    """Bases of matrices of (rows, rank), all in one call."""
    factors = Factors(tuple(Matrix(0, len(m), 1, m.shape[1]) for m in matrices))
    p = torch.cat([torch.from_numpy(m.T.copy()).reshape(-1) for m in matrices]).to(dtype)
    kernels.orthogonalize(p, factors)
    flat = p.double().numpy()
    pieces = numpy.split(flat, list(factors.left_offsets[1:-1]))
    return [piece.reshape(m.shape[1], len(m)).T for piece, m in zip(pieces, matrices, strict=True)]


def assert_orthonormal(basis, dtype=torch.float32):
    allowed = 4 * len(basis) ** 0.5 * basis.shape[1] * EPSILON[dtype]
    assert numpy.abs(basis.T @ basis - numpy.eye(basis.shape[1])).max() <= allowed


def assert_spans(basis, matrix, dtype=torch.float32):
    """The columns of the matrix lie in the span of the basis, up to rounding at the matrix's scale."""
    scaled = torch.from_numpy(matrix).to(dtype).double().numpy()
    scaled = scaled / max(numpy.abs(scaled).max(), 1e-300)
    outside = scaled - basis @ (basis.T @ scaled)
    assert numpy.abs(outside).max() <= 8 * len(basis) ** 0.5 * basis.shape[1] * EPSILON[dtype]


def low_rank(rows, rank, true_rank):
    return numbers(rows, true_rank) @ numbers(true_rank, rank, seed=1)


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("rows", "rank"), SIZES)
def test_columns_become_orthonormal_and_span_the_input_at_any_scale(rows, rank, scale, dtype):
    matrix = numbers(rows, rank) * scale
    (basis,) = orthogonalized(matrix, dtype=dtype)
    assert_orthonormal(basis, dtype)
    assert_spans(basis, matrix, dtype)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("true_rank", [1, 2, 3])
@pytest.mark.parametrize(("rows", "rank"), [(4, 4), (9, 4), (103, 8)])
def test_a_deficient_matrix_is_completed_to_a_basis(rows, rank, true_rank, scale):
    matrix = low_rank(rows, rank, true_rank) * scale
    (basis,) = orthogonalized(matrix)
    assert_orthonormal(basis)
    assert_spans(basis, matrix)


def special(rows=9, rank=4):
    """Matrices that a Gram-Schmidt without care turns into NaN or into nothing."""
    random, ones = numbers(rows, rank), numpy.ones((rows, rank))
    first = numpy.zeros((rows, rank))
    first[:, 0] = random[:, 0]
    return {
        "zero": numpy.zeros((rows, rank)),
        "negative zero": numpy.full((rows, rank), -0.0),
        "equal columns": ones,
        "opposite columns": ones * [1, -1, 1, -1],
        "only the first column": first,
        "only the last column": first[:, ::-1].copy(),
        "a zero column between": random * [1, 0, 1, 1],
        "one element": numpy.eye(rows, rank) * [0, 0, 1, 0],
        "the smallest denormal": numpy.eye(rows, rank) * 1.4e-45,
        "the largest number": numpy.full((rows, rank), 3.4e38),
        "alternating signs at the limit": 3.4e38 * (-1.0) ** numpy.arange(rows * rank).reshape(rows, rank),
        "columns of very different scale": random * [1e38, 1.0, 1e-38, 1e-45],
        "rows of very different scale": random * numpy.geomspace(1e-45, 1e38, rows)[:, None],
        "almost equal columns": ones + random * 1e-7,
    }


@pytest.mark.parametrize("name", special())
def test_a_degenerate_matrix_of_finite_numbers_gives_a_basis_and_never_nan(name):
    matrix = special()[name]
    (basis,) = orthogonalized(matrix)
    assert numpy.isfinite(basis).all()
    assert_orthonormal(basis)
    assert_spans(basis, matrix)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [(0, 0), (8, 3), (4, 1)])
def test_a_matrix_with_an_element_that_is_not_finite_becomes_nan_and_no_other_does(place, bad):
    matrices = [numbers(9, 4, seed=seed) for seed in range(3)]
    matrices[1][place] = bad
    before, spoiled, after = orthogonalized(*matrices)
    assert numpy.isnan(spoiled).all()
    for basis, matrix in ((before, matrices[0]), (after, matrices[2])):
        assert_orthonormal(basis)
        assert_spans(basis, matrix)


def test_matrices_of_different_shape_and_scale_go_in_one_call_and_a_basis_depends_on_its_own_alone():
    matrices = [numbers(rows, rank, seed=seed) * SCALES[seed % 8] for seed, (rows, rank) in enumerate(SIZES)]
    for basis, matrix in zip(orthogonalized(*matrices), matrices, strict=True):
        assert numpy.array_equal(orthogonalized(matrix)[0], basis)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("scale", [1e-45, 1e-40, 1e-38, 1e-20, 1.0, 1e20, 1e38])
def test_normalize_gives_length_one_at_any_scale_and_keeps_the_direction(kind, dtype, scale):
    shapes = SHAPES[kind]
    factors, _ = laid_out(shapes)
    q = (normal(factors.right_offsets[-1], torch.float64).clamp(-3, 3) * scale).to(dtype)
    given = parts(q, shapes, "right")
    kernels.normalize(q, factors)
    for before, after in zip(given, parts(q, shapes, "right"), strict=True):
        largest = numpy.abs(before).max(0, keepdims=True)
        scaled = before / numpy.where(largest == 0, 1, largest)
        length = numpy.linalg.norm(scaled, axis=0)
        assert numpy.abs(after - scaled / numpy.where(length == 0, 1, length)).max() <= 1e-6


def test_normalize_leaves_a_zero_vector_zero_beside_others():
    q = torch.tensor([0.0, 0.0, 3.0, 4.0])
    kernels.normalize(q, Factors((Matrix(0, 2, 2, 2),)))
    assert numpy.allclose(q.numpy(), [0.0, 0.0, 0.6, 0.8])


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_normalize_does_not_hide_an_element_that_is_not_finite(bad):
    q = torch.tensor([1.0, bad, 3.0, 4.0])
    kernels.normalize(q, Factors((Matrix(0, 2, 2, 2),)))
    assert not q[:2].isfinite().all()
    assert q[2:].isfinite().all()
